"""Whatever is killed, every step has its loss in the metrics."""

from __future__ import annotations

from pathlib import Path

import pytest
from rehearsed import events, finish, last_words, losses, running

from craton.bench.recovery.rehearsal import Rehearsal

STEPS = 40


@pytest.mark.slow
def test_every_step_has_a_record_after_kills_of_ranks_and_agents(runs: Path) -> None:
    chaos = (
        "kill rank=0@during=staging,step=8",
        "kill rank=0@step=15",
        "kill agent=node-0@step=22",
        "kill coordinator@step=30",
    )
    layout = {"fsdp": 2, "micro_batch": 4}
    rehearsal = Rehearsal("records", ranks_per_node=1, layout=layout, steps=STEPS, chaos=chaos)
    with running(runs, rehearsal) as run:
        finish(run)
        assert [event["fault"] for event in events(run, "chaos_fired")] == list(chaos)
        assert sorted(losses(run)) == list(range(1, STEPS + 1)), last_words(run)
        assert events(run, "records_completed"), "no kill came between a step and its record"
