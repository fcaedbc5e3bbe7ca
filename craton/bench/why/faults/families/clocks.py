"""Wall clocks of nodes that are wrong, jump or drift.

The machine's clock stays as it is: a preloaded library (`clock.c`) gives the processes of a node another wall clock.
"""

from __future__ import annotations

import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.running import RunningJob

SHIM = Path(__file__).parent.parent / "clock.c"
ENTRY = "=ddd"  # offset, rate, since: as in clock.c
HOUR = 3600.0
CLOCK = (r"\bclocks?\b", r"\bNTP\b", r"\bchrony", r"time synchroni[sz]ation", r"\btime (skew|jump|differ)")
NEEDS = ("gcc",)
LAYOUT = {"fsdp": 2, "micro_batch": 4}


def with_clocks(*numbers: int, offset: float = 0.0) -> Callable[[RunningJob], None]:
    """Give every process of the run a clock that can be changed; those of the given nodes start with an offset."""

    def prepare(job: RunningJob) -> None:
        page = _page(job)
        page.write_bytes(bytes(4096))
        library = page.with_suffix(".so")
        command = ["gcc", "-shared", "-fPIC", "-O2", "-o", str(library), str(SHIM)]
        subprocess.run(command, check=True, capture_output=True)
        job.environment.update(LD_PRELOAD=str(library), CLOCK_FILE=str(page))
        for number in numbers:
            _set_clock(job, number, offset)

    return prepare


def jump(*numbers: int, seconds: float) -> Callable[[RunningJob], None]:
    """Move the clocks of these nodes by so many seconds."""

    def inject(job: RunningJob) -> None:
        for number in numbers:
            _set_clock(job, number, seconds)

    return inject


def drift(number: int, rate: float) -> Callable[[RunningJob], None]:
    """Let a node's clock run faster by this rate."""
    return lambda job: _set_clock(job, number, 0.0, rate)


def _set_clock(job: RunningJob, number: int, offset: float, rate: float = 0.0) -> None:
    with _page(job).open("r+b") as page:
        page.seek(number * struct.calcsize(ENTRY))
        page.write(struct.pack(ENTRY, offset, rate, time.time()))


def _page(job: RunningJob) -> Path:
    return job.folder.parent / "clocks"


def _wrong_clock(conditions: tuple[str, ...] = ("healthy", "slow")) -> ExpectedVerdict:
    return ExpectedVerdict(layers=("host",), conditions=conditions, ranks=frozenset({1}), node="node-1", remedy=CLOCK)


FAULTS = (
    LiveFault(
        name="clock-ahead-from-the-start",
        family="clocks",
        summary="The clock of node-1 is ten minutes ahead from the start; the run works.",
        source="https://github.com/rubrikinc/kronos/pull/10",
        job=JobRecipe(keys={"layout": LAYOUT}, prepare=with_clocks(1, offset=600.0)),
        expected=_wrong_clock(),
        onset="start",
        judge_seconds=90,
        needs=NEEDS,
    ),
    LiveFault(
        name="clock-jumps-forward",
        family="clocks",
        summary="The clock of node-1 jumps an hour ahead while the run trains.",
        source="https://github.com/hazelcast/hazelcast/pull/4226",
        job=JobRecipe(keys={"layout": LAYOUT}, prepare=with_clocks()),
        inject=jump(1, seconds=HOUR),
        expected=_wrong_clock(),
        judge_seconds=30,
        needs=NEEDS,
    ),
    LiveFault(
        name="clock-jumps-back",
        family="clocks",
        summary="The clock of node-1 jumps an hour back while the run trains.",
        source="https://github.com/perfsonar/project/issues/374",
        job=JobRecipe(keys={"layout": LAYOUT}, prepare=with_clocks()),
        inject=jump(1, seconds=-HOUR),
        expected=_wrong_clock(),
        judge_seconds=30,
        needs=NEEDS,
    ),
    LiveFault(
        name="clock-drifts",
        family="clocks",
        summary="The clock of node-1 gains two seconds every second while the run trains.",
        source="https://github.com/cBio/cbio-cluster/issues/302",
        job=JobRecipe(keys={"layout": LAYOUT}, prepare=with_clocks()),
        inject=drift(1, rate=2.0),
        expected=_wrong_clock(),
        judge_seconds=40,
        needs=NEEDS,
    ),
    LiveFault(
        name="clock-of-all-nodes-jumps",
        family="clocks",
        summary="The clocks of all nodes jump two hours ahead of the machine that runs `craton why`.",
        source="https://github.com/forTEXT/catma/issues/232",
        job=JobRecipe(keys={"layout": LAYOUT}, prepare=with_clocks()),
        inject=jump(0, 1, seconds=2 * HOUR),
        expected=ExpectedVerdict(layers=("host",), conditions=("healthy", "slow"), ranks=frozenset(), remedy=CLOCK),
        judge_seconds=30,
        needs=NEEDS,
    ),
    LiveFault(
        name="clock-jump-expires-a-lease",
        family="clocks",
        summary="The clock of node-1 jumps an hour ahead; a command there takes its lease for expired and raises.",
        source="https://github.com/ros/nodelet_core/issues/35",
        job=JobRecipe(
            kind="command",
            keys={"command": [sys.executable, "clocks.py"], "progress": {"pattern": "step {step} loss {loss}"}},
            program="clocks",
            prepare=with_clocks(),
        ),
        inject=jump(1, seconds=HOUR),
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("dead",),
            ranks=frozenset({1}),
            node="node-1",
            remedy=(*CLOCK, r"lease"),
        ),
        needs=NEEDS,
    ),
)
