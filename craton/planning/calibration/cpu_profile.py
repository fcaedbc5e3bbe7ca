"""The profile of Craton's own loop on a CPU whose operations were measured: no constant of another machine is left.

The constants that remain say how this loop differs from what the machine's measurement runs; they were chosen with the
first half of the jobs of `benchmarks/train_cpu.py`, on two Arm cores.
"""

from __future__ import annotations

import math

from craton.infrastructure import CpuRank, Gpu
from craton.planning.fitting import QUANTILE_80
from craton.planning.software import NAMES, SoftwareProfile, Traits

MAX_RATIO = 2.0  # of the high to the low end of the interval: a wider one would not help anybody
IDLE_DEVIATION = 0.24  # standard deviation of log(measured / planned) on a machine that runs nothing else
LAUNCH_LEVEL = 1.25  # Python around an operation: modules, hooks, autograd functions
LOOP_LEVEL = 32.0  # the loop's own step over that of the measurement: loader, agreement, records, ledger
CONSTANTS_OF_CPU = {
    "network_slowdown": 1.8,  # ranks never arrive at a collective at the same moment
    "nvlink_slowdown": 1.8,
    "recompute_cost": 1.4,  # a checkpointed block runs its forward pass under hooks that save and compare tensors
    "optimizer_passes": 3.0,
    "dispatch_seconds": 1e-9,  # counted as operations
    "straggle": 0.05,
    "bubble": 1.2,
}


def cpu_profile(name: str, traits: Traits, card: Gpu) -> SoftwareProfile:
    """Return the constants of Craton's loop on this CPU under its load."""
    cpu = card.cpu
    assert cpu is not None
    constants = {
        **dict.fromkeys(NAMES, 1.0),
        **CONSTANTS_OF_CPU,
        "launch_seconds": LAUNCH_LEVEL * cpu.costs.operation_seconds * cpu.serial_slowdown,
        "step_overhead_seconds": LOOP_LEVEL * cpu.costs.loop_seconds * cpu.serial_slowdown,
    }
    size = len(NAMES) + 1
    return SoftwareProfile(
        name=name,
        gpu=card.name,
        traits=traits,
        log_constants=tuple(math.log(constants[name]) for name in NAMES),
        log_scale=0.0,
        covariance=((0.0,) * size,) * size,
        own_cluster=_own_deviation(cpu),
        calibrated=True,
        source="measured on this machine: `craton catalog local`",
        unexplained_factor=0.0,  # own_cluster is the whole deviation
    )


def _own_deviation(cpu: CpuRank) -> float:
    """Return the deviation that the load adds to, up to the widest interval allowed. Other processes come and go: what
    they cost is the least certain part."""
    largest = math.log(MAX_RATIO) / (2.0 * QUANTILE_80)
    return min(IDLE_DEVIATION + 0.1 * math.log(cpu.parallel_slowdown), largest)
