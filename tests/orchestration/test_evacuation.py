"""What a run is said to lose when it leaves a node for its spare."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from craton.agent import Launch, write_launch
from craton.orchestration.changes import plan_evacuation
from craton.telemetry import RunDirectory
from craton.telemetry.node import Heartbeat, write_heartbeat


@pytest.mark.parametrize(
    ("nursery", "cost"), [(["x"], "no step is lost"), ([], "the command is stopped and restarted")]
)
def test_a_command_is_not_promised_what_only_training_can_keep(tmp_path: Path, nursery: list[str], cost: str) -> None:
    run = RunDirectory.create(tmp_path, "run")
    write_launch(run, Launch(0, ["a", "b", "c"], 1, ["x"], num_nodes=2, nursery=nursery))
    write_heartbeat(run, "c", Heartbeat(0, "spare", os.getpid(), 0))
    way = plan_evacuation(run, "b")
    assert (way.how, way.sentence) == ("spare", f"c, a spare, takes the place of b; {cost}")
