"""What a node is and how it does, read from its files and tools: the probes, and the tables they are judged by."""

from craton.infrastructure.probes.disks import Disks, Drive, LustreClient, Mount, read_mounts
from craton.infrastructure.probes.fabric import Fabric, FabricDevice
from craton.infrastructure.probes.gpus import Gpus, GpuState, probe_gpus
from craton.infrastructure.probes.host import UNLIMITED, Host
from craton.infrastructure.probes.kernel_log import KernelLog, Xid, driver_was_loaded, read_xids
from craton.infrastructure.probes.report import NodeReport, probe_node, report_json
from craton.infrastructure.probes.root import NodeRoot
from craton.infrastructure.probes.software import Software, version_numbers
from craton.infrastructure.probes.tables import (
    HEALTH_ACTIONS,
    BadPair,
    CounterFact,
    HealthAction,
    Trap,
    XidFact,
    bad_pairs,
    counter_facts,
    is_in,
    lustre_interfaces,
    recovery_action,
    traps,
    xid_action,
    xid_facts,
)

__all__ = [
    "HEALTH_ACTIONS",
    "UNLIMITED",
    "BadPair",
    "CounterFact",
    "Disks",
    "Drive",
    "Fabric",
    "FabricDevice",
    "GpuState",
    "Gpus",
    "HealthAction",
    "Host",
    "KernelLog",
    "LustreClient",
    "Mount",
    "NodeReport",
    "NodeRoot",
    "Software",
    "Trap",
    "Xid",
    "XidFact",
    "bad_pairs",
    "counter_facts",
    "driver_was_loaded",
    "is_in",
    "lustre_interfaces",
    "probe_gpus",
    "probe_node",
    "read_mounts",
    "read_xids",
    "recovery_action",
    "report_json",
    "traps",
    "version_numbers",
    "xid_action",
    "xid_facts",
]
