"""Runs live faults: two side by side; alone those that load the whole machine, and those on Slurm.

Slurm is found by a variable of this process, so there can be one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from craton.bench.why.faults.environment import Workshop
from craton.bench.why.faults.fault import LiveFault
from craton.bench.why.faults.watch import FaultRecord, run_fault

SIDE_BY_SIDE = 2


def run_faults(
    faults: Sequence[LiveFault], root: Path, keep: Path, progress: Callable[[int, int, str], None] | None = None
) -> list[FaultRecord]:
    """Run every fault once, in the folder `root`; what was seen stays in `keep`."""
    workshop = Workshop(root)
    records: dict[str, FaultRecord] = {}

    def run(fault: LiveFault) -> None:
        records[fault.name] = run_fault(fault, workshop, keep)
        if progress is not None:
            progress(len(records), len(faults), fault.name)

    alone = [fault for fault in faults if fault.is_alone or fault.job.on == "slurm"]
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        list(pool.map(run, [fault for fault in faults if fault not in alone]))
    for fault in alone:
        run(fault)
    return [records[fault.name] for fault in faults]
