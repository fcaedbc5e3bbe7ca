"""Whom the others wait for: the page, the terminal and `craton why` name the same ranks, or all none."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from simulated_runs import STEP_SECONDS, write_run

from craton.observability.diagnosis import Symptom, straggler_of
from craton.observability.diagnosis.collect import snapshot as taking
from craton.observability.diagnosis.snapshot import RunFacts, Snapshot
from craton.observability.diagnosis.symptoms import symptoms
from craton.observability.diagnosis.verdict import Symptoms
from craton.observability.web.readers import KEPT_LINES, NodeMember, RankTable, RankTails, read_member
from craton.observability.web.sources import CachedVerdict, Late, examine
from craton.observability.web.stragglers import finding, straggler
from craton.orchestration import Standing
from craton.telemetry import RunDirectory

NODES, RANKS_PER_NODE, STEPS = 4, 4, 40
Extra = Callable[[int, int], float]  # rank, step → seconds that it computes longer than usual, and waits less


def noise(rank: int, step: int) -> float:
    """Every rank is as fast as it is: one of them is always the last, and far from the median."""
    return 0.15 * random.Random(rank).gauss(0.0, 1.0)


CASES: dict[str, tuple[Extra, int, tuple[int, ...]]] = {  # who computes longer, stages, who is to be named
    "balanced": (lambda rank, step: 0.0, 1, ()),
    "one late rank": (lambda rank, step: 0.3 if rank == 6 else 0.0, 1, (6,)),
    "a little late": (lambda rank, step: 0.18 if rank == 6 else 0.0, 1, (6,)),
    "one late node": (lambda rank, step: 0.3 if rank in range(8, 12) else 0.0, 1, (8, 9, 10, 11)),
    "noise": (noise, 1, ()),
    "one bad step": (lambda rank, step: 0.3 if (rank, step) == (5, STEPS) else 0.0, 1, ()),
    "stages": (lambda rank, step: 0.3 if rank >= 12 else 0.0, 4, ()),
    "late in its stage": (lambda rank, step: 0.2 * (rank >= 12) + 0.3 * (rank == 2), 4, (2,)),
    "first steps": (lambda rank, step: 0.3 if rank == 6 else 0.0, 1, ()),
}


def run_of(root: Path, extra: Extra, stages: int = 1, steps: int = STEPS) -> RunDirectory:
    run = write_run(root, "one", nodes=NODES, ranks_per_node=RANKS_PER_NODE, steps=steps)
    launch, plan = (json.loads(path.read_text()) for path in (run.launch_path, run.plan_path))
    run.launch_path.write_text(json.dumps({**launch, "gpus": True}))
    layout = {**plan["layout"], "pp": stages}
    slow = {**plan, "layout": layout, "step_seconds_high": 2 * STEP_SECONDS}  # it is about ranks, not about the plan
    run.plan_path.write_text(json.dumps(slow))
    for number in range(NODES):
        path = run.metrics_path(f"node-{number}")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            seconds = extra(line["rank"], line["step"])
            line["run_compute_seconds"] += seconds
            line["run_communication_seconds"] -= seconds
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def seen(run: RunDirectory) -> tuple[NodeMember, RankTable]:
    member = read_member(run)
    return member, RankTails(run).look(member.nodes, member.ranks_per_node, member.generation, member.num_stages)


@pytest.mark.parametrize("case", CASES)
def test_the_page_and_why_name_the_same_ranks_or_none(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taking, "standing_of", lambda run: Standing("running"))  # it has no agents
    extra, stages, named = CASES[case]
    run = run_of(tmp_path, extra, stages, KEPT_LINES - 1 if case == "first steps" else STEPS)
    answer = examine(run)
    assert answer.condition == ("slow" if named else "healthy"), answer.sentence
    assert answer.rank == (named[0] if len(named) == 1 else None)
    member, table = seen(run)
    for late in (straggler(run, "running", member, table, None), answer.late):
        assert tuple(sorted(late.ranks)) == named if late else not named
    nodes = tuple(dict.fromkeys(f"node-{rank // RANKS_PER_NODE}" for rank in named))
    assert (answer.late.nodes if answer.late else ()) == nodes
    told = finding(table, answer.late, "running")
    if len(named) == 1:
        assert told.startswith(f"Rank {named[0]} on {nodes[0]} spends ")
    elif named:
        assert told.startswith(f"4 ranks on {nodes[0]} spend ")
    else:
        assert told == (
            "Ranks are compared once each has reported 13 steps"
            if case == "first steps"
            else "No straggler in the last steps"
        )


def test_a_rank_that_breaks_again_and_again_is_not_one_that_the_others_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    breaks = Symptom("slow", "came back 5 times", ranks=(3,), nodes=("node-0",), lost_share=0.5, sign="restarts")
    late = Symptom("slow", "loses", ("rank 6 spends",), ranks=(6,), nodes=("node-1",), phase="compute", lost_share=0.1)
    for all_of, found in (((breaks, late), late), ((breaks,), None)):
        monkeypatch.setattr(symptoms, "symptoms_of", lambda snapshot, all_of=all_of: Symptoms(all_of))
        assert straggler_of(Snapshot(0.0, RunFacts("one"))) == found


def test_beside_a_verdict_the_ranks_are_those_that_it_names(tmp_path: Path) -> None:
    run = run_of(tmp_path, CASES["one late rank"][0])
    member, table = seen(run)

    def late_with(verdict: CachedVerdict | None, state: str = "running") -> Any:
        return straggler(run, state, member, table, verdict)

    found = late_with(None)
    assert (found.ranks, found.nodes) == ((6,), ("node-1",))
    assert found.share == pytest.approx(0.3 / STEP_SECONDS, rel=0.1)
    other = Late("rank 9 on node-2 spends 2.00 times as long", (9,), ("node-2",), 0.4)
    assert late_with(CachedVerdict("slow", "it is hot", late=other)) == other
    assert late_with(CachedVerdict("hung", "rank 3 hangs")) is None
    assert late_with(CachedVerdict("healthy", "all is well")) is None
    assert late_with(CachedVerdict("unknown", "diagnosis failed", time=time.time())) == found
    assert late_with(None, "failed") is None
    assert finding(table, None, "failed") == "Last steps of the ranks; they are compared only while the run is active"
    assert finding(table, other, "running").endswith("times as long: 40% of every step is lost")
