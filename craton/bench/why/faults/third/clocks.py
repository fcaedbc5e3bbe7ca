"""Wall clocks of nodes, third set: a clock that stands still, and what caches, budgets, watchdogs and zones make of
time."""

from __future__ import annotations

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.node_clocks import CLOCK, HOUR, NEEDS, drift, jump, with_clocks

PROGRAM = "third_clocks"
MISLEADING = (r"add memory|out of memory|learning rate",)


def _script(fault: str, victim: int | None = None) -> JobRecipe:
    progress = {"pattern": "step {step} loss {loss}", "hang": "10x"}
    return JobRecipe(
        kind="command",
        keys={"command": ["{python}", f"{PROGRAM}.py"], "progress": progress},
        program=PROGRAM,
        fault=fault,
        victim=victim,
        prepare=with_clocks(),
    )


FAULTS = (
    LiveFault(
        name="clock-stands-still",
        family="clocks",
        summary="The wall clock of node-1 no longer advances, as in a guest that was paused; the run works.",
        source="https://github.com/diggerhq/opencomputer/pull/530",
        job=JobRecipe(
            keys={
                "model": {"experts": 4, "top_k": 2, "moe_ffn_hidden": 64},
                "layout": {"fsdp": 2, "ep": 2, "micro_batch": 4},
            },
            prepare=with_clocks(),
        ),
        inject=drift(1, rate=-1.0),
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("healthy", "slow"),
            ranks=frozenset({1}),
            node="node-1",
            remedy=CLOCK,
            misleading=MISLEADING,
        ),
        judge_seconds=40,
        needs=NEEDS,
    ),
    LiveFault(
        name="clock-ahead-expires-a-cache",
        family="clocks",
        summary="The clock of node-1 jumps a day ahead; its data source takes every cached sample for old.",
        source="https://github.com/clerk/javascript/pull/672",
        job=JobRecipe(
            keys={
                "data": {"path": None, "tokenizer": None, "source": f"{PROGRAM}:from_cache"},
                "layout": {"replicate": 2, "micro_batch": 4},
            },
            program=PROGRAM,
            prepare=with_clocks(),
        ),
        inject=jump(1, seconds=24 * HOUR),
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("slow",),
            ranks=frozenset({1}),
            node="node-1",
            remedy=(*CLOCK, r"cache|expire|data[._ ]?source|from_cache|wait(s|ing)? for data"),
            misleading=MISLEADING,
        ),
        judge_seconds=35,
        needs=NEEDS,
    ),
    LiveFault(
        name="clock-ahead-ends-a-time-budget",
        family="clocks",
        summary="The clock of node-1 jumps a day ahead; a script there takes its 12 hours for used up and exits.",
        source="https://github.com/pytorch/ignite/issues/3841",
        job=_script("budget"),
        inject=jump(1, seconds=24 * HOUR),
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("dead", "hung"),
            ranks=frozenset({1}),
            node="node-1",
            remedy=(*CLOCK, r"time budget|used up|exit(ed|s)?\b.*\b0\b|ended early|finished early"),
            misleading=MISLEADING,
        ),
        judge_seconds=25,
        needs=NEEDS,
    ),
    LiveFault(
        name="clock-behind-alarms-a-watchdog",
        family="clocks",
        summary="The clock of node-1 jumps ten minutes back; the watchdog of rank 0 takes its heartbeats for old.",
        source="https://github.com/pytorch/pytorch/pull/56538",
        job=_script("watchdog"),
        inject=jump(1, seconds=-600.0),
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("dead",),
            ranks=frozenset({0, 1}),  # rank 0 raises, the clock of rank 1 is wrong
            node="node-1",
            remedy=(*CLOCK, r"heartbeat"),
            misleading=MISLEADING,
        ),
        judge_seconds=25,
        needs=NEEDS,
    ),
    LiveFault(
        name="clock-in-another-time-zone",
        family="clocks",
        summary="The image of rank 1 has another time zone; it takes the weights that rank 0 wrote for nine hours old.",
        source="https://github.com/celery/django-celery/pull/332",
        job=_script("zone", victim=1),
        expected=ExpectedVerdict(
            layers=("framework", "host"),
            conditions=("dead",),
            ranks=frozenset({1}),
            node="node-1",
            remedy=(*CLOCK, r"time ?zone|\bTZ\b|\bUTC\b|seconds old|stale"),
            misleading=MISLEADING,
        ),
        judge_seconds=25,
        needs=NEEDS,
    ),
)
