"""Probes of a node: GPUs, fabric, disks and software, read from its files and tools or from a node image."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.infrastructure.probes.disks import read_mounts
    from craton.infrastructure.probes.gpus import GpuState, probe_gpus
    from craton.infrastructure.probes.host import UNLIMITED
    from craton.infrastructure.probes.kernel_log import Xid, driver_was_loaded, read_xids
    from craton.infrastructure.probes.report import NodeReport, probe_node, report_json
    from craton.infrastructure.probes.root import NodeRoot
    from craton.infrastructure.probes.tables import (
        HEALTH_ACTIONS,
        HealthAction,
        bad_pairs,
        counter_facts,
        is_in,
        lustre_interfaces,
        recovery_action,
        traps,
        xid_action,
        xid_facts,
    )
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
