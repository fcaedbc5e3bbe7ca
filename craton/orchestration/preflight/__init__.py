"""Pre-flight checks of nodes before the first step: GPUs, host, network, software, self-tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.orchestration.preflight.finding import PreflightFinding, ordered
    from craton.orchestration.preflight.local import check_local
    from craton.orchestration.preflight.nccl_log import diagnose_nccl_log, read_nccl_log
    from craton.orchestration.preflight.node_check import MEASURED_BYTES, Diagnosis, diagnose, preflight
    from craton.orchestration.preflight.selftest import COMPUTE_SECONDS, SECRET_VARIABLE, bandwidth_command
    from craton.orchestration.preflight.several_nodes import GANG_CHECKS, check_bandwidth, check_compute
    from craton.orchestration.preflight.sharing import sharing_found
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
