"""launch.json is written and read back equal, and refused with everything that is wrong about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from craton.agent import Launch, LaunchError, read_launch, write_launch
from craton.telemetry import RunDirectory


def test_a_launch_is_read_back_equal(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "a")
    with pytest.raises(LaunchError, match="does not exist"):
        read_launch(run)
    launch = Launch(
        generation=3,
        nodes=["a", "b"],
        ranks_per_node=4,
        command=["python", "-m", "x"],
        env={"A": "b"},
        master_address="10.0.0.1",
        master_port=1234,
        threads_per_rank=2,
        gpus=True,
        cards={"a": "0,1,2,3"},
        track=["tensorboard"],
        metrics_port=9100,
        leaves={"a": "leaf-1"},
    )
    write_launch(run, launch)
    assert read_launch(run) == launch
    assert launch.world_size == 8


def test_a_launch_says_everything_that_is_wrong() -> None:
    with pytest.raises(LaunchError) as caught:
        Launch(generation=-1, nodes=["a", "a"], ranks_per_node=1, command=[], master_port=70000, env={"A": 1})  # type: ignore[dict-item]
    for name in ("generation", "nodes", "command", "master_port", "env"):
        assert f"{name} is" in str(caught.value)
    assert "ranks_per_node" not in str(caught.value)
