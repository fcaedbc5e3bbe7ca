"""Wall clocks of nodes, fourth set: negative pauses, numbers that must grow, a rate limit, slow readings, files that
look old."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.node_clocks import CLOCK, NEEDS, drift, jump, with_clocks
from craton.bench.why.faults.running import RunningJob

PROGRAM = "fourth_clocks"
MISLEADING = (r"add memory|out of memory|learning rate",)
SLOW_CLOCK = Path(__file__).parent / "slow_clock.c"
READING_SECONDS = 60e-6
HALF_AN_HOUR = 1800.0


def _script(fault: str, nodes: int, settled_step: int = 20) -> JobRecipe:
    progress = {"pattern": "step {step} loss {loss}", "hang": "15m"}
    return JobRecipe(
        kind="command",
        nodes=nodes,
        keys={"command": ["{python}", f"{PROGRAM}.py"], "progress": progress},
        program=PROGRAM,
        fault=fault,
        prepare=with_clocks(),
        settled_step=settled_step,
    )


def _with_slow_clocks(job: RunningJob) -> None:
    """Give every rank of the run clocks whose readings can become slow."""
    page = _page(job)
    page.write_bytes(bytes(4096))
    library = page.with_suffix(".so")
    command = ["gcc", "-shared", "-fPIC", "-O2", "-o", str(library), str(SLOW_CLOCK)]
    subprocess.run(command, check=True, capture_output=True)
    job.environment.update(LD_PRELOAD=str(library), CLOCK_FILE=str(page))


def _slow_readings(number: int) -> Callable[[RunningJob], None]:
    """Make each reading of a clock on a node take READING_SECONDS."""

    def inject(job: RunningJob) -> None:
        with _page(job).open("r+b") as page:
            page.seek(number * struct.calcsize("=d"))
            page.write(struct.pack("=d", READING_SECONDS))

    return inject


def _page(job: RunningJob) -> Path:
    return job.folder.parent / "readings"


FAULTS = (
    LiveFault(
        name="clock-ahead-makes-a-pause-negative",
        family="clocks",
        summary="The clock of node-2 jumps half an hour ahead; a script there computes a pause below 0 and raises.",
        source="https://github.com/lumapu/ahoy/pull/371",
        job=_script("pace", nodes=3, settled_step=8),
        inject=jump(2, seconds=HALF_AN_HOUR),
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("dead",),
            ranks=frozenset({2}),
            node="node-2",
            remedy=(*CLOCK, r"sleep length|non-negative|negative"),
            misleading=MISLEADING,
        ),
        judge_seconds=25,
        needs=NEEDS,
    ),
    LiveFault(
        name="clock-back-stops-numbering",
        family="clocks",
        summary="The clock of node-1 goes back by 30 s; the numbers of its batches must grow, so its objective raises.",
        source="https://github.com/dotnetcore/CAP/issues/1050",
        job=JobRecipe(
            kind="sft",
            keys={
                "objective": f"{PROGRAM}:objective",
                "train": {"lora": {"rank": 4}},
                "layout": {"replicate": 2},
            },
            program=PROGRAM,
            fault="numbers",
            prepare=with_clocks(),
        ),
        inject=jump(1, seconds=-30.0),
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("dead",),
            ranks=frozenset({1}),
            node="node-1",
            remedy=(*CLOCK, r"moved backwards|refusing to make"),
            misleading=MISLEADING,
        ),
        judge_seconds=25,
        needs=NEEDS,
    ),
    LiveFault(
        name="clock-slow-starves-a-rate-limit",
        family="clocks",
        summary="The clock of node-0 runs at a tenth of its speed; the rate limit of its data source hardly opens.",
        source="https://github.com/docker-archive/toolbox/issues/193",
        job=JobRecipe(
            keys={
                "data": {"path": None, "tokenizer": None, "source": f"{PROGRAM}:from_service"},
                "layout": {"fsdp": 2, "micro_batch": 4},
            },
            program=PROGRAM,
            prepare=with_clocks(),
        ),
        inject=drift(0, rate=-0.9),
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("slow",),
            ranks=frozenset({0}),
            node="node-0",
            remedy=(*CLOCK, r"rate|bucket|data[._ ]?source|from_service|wait(s|ing)? for data"),
            misleading=MISLEADING,
        ),
        judge_seconds=35,
        needs=NEEDS,
    ),
    LiveFault(
        name="clock-readings-slow",
        family="clocks",
        summary="The kernel of node-1 changes to a slow clock source; an objective that times each token is held up.",
        source="https://github.com/sozu-proxy/sozu/issues/500",
        job=JobRecipe(
            keys={"objective": f"{PROGRAM}:objective", "layout": {"tp": 2}},
            program=PROGRAM,
            fault="timings",
            prepare=_with_slow_clocks,
        ),
        inject=_slow_readings(1),
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("slow",),
            ranks=frozenset({1}),
            node="node-1",
            remedy=(*CLOCK, r"clock_?source|gettime|perf_counter|take_timings|objective|py-spy|stack|profil|compute"),
            misleading=MISLEADING,
        ),
        judge_seconds=30,
        needs=NEEDS,
    ),
    LiveFault(
        name="clock-ahead-makes-files-old",
        family="clocks",
        summary="The clock of node-1 jumps ahead; rank 1 takes all new weights for old ones, and waits for newer ones.",
        source="https://github.com/snakemake/snakemake/issues/3261",
        job=_script("fresh", nodes=2),
        inject=jump(1, seconds=HALF_AN_HOUR),
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("hung", "dead"),
            ranks=frozenset({1}),
            node="node-1",
            remedy=(*CLOCK, r"load_fresh|weights|sleep|stack|py-spy|fourth_clocks"),
            misleading=MISLEADING,
        ),
        judge_seconds=25,
        needs=NEEDS,
    ),
)
