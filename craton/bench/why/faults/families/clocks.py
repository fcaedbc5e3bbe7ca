"""Wall clocks of nodes that are wrong, jump or drift."""

from __future__ import annotations

import sys

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.node_clocks import CLOCK, HOUR, NEEDS, drift, jump, with_clocks

LAYOUT = {"fsdp": 2, "micro_batch": 4}


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
