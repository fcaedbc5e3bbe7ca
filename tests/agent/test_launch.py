"""launch.json is written and read back equal, and refused with everything that is wrong about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from craton.agent import Launch, LaunchError, LaunchSchemaError, read_launch, write_launch
from craton.telemetry import RunDirectory
from craton.version import VERSION


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


def test_its_schema_is_written_and_a_newer_one_refused_in_one_line(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "a")
    launch = Launch(generation=0, nodes=["a"], ranks_per_node=1, command=["true"])
    write_launch(run, launch)
    document = json.loads(run.launch_path.read_text())
    assert next(iter(document.items())) == ("schema", 1)
    del document["schema"]
    run.launch_path.write_text(json.dumps(document))
    assert read_launch(run) == launch, "as before there was one"
    run.launch_path.write_text(json.dumps({"schema": 2, "of": "another shape"}))
    with pytest.raises(LaunchSchemaError) as caught:
        read_launch(run)
    assert str(caught.value) == (
        f"{run.launch_path}: schema 2 is newer than schema 1, which this Craton ({VERSION}) reads; use the version of "
        "Craton that wrote it, or a newer one"
    )
    for wrong in ("1", 0, True, [1]):
        run.launch_path.write_text(json.dumps({**document, "schema": wrong}))
        with pytest.raises(LaunchError, match="is not allowed; allowed: 1"):
            read_launch(run)


def test_a_module_that_was_renamed_since_is_found(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "a")
    old = ["python3", "-m", "craton.ml.nursery", str(run.path)]
    command = ["python3", "train.py", "craton.ml.nursery"]
    write_launch(run, Launch(generation=0, nodes=["a"], ranks_per_node=1, command=command, nursery=old))
    launch = read_launch(run)
    assert launch.nursery == ["python3", "-m", "craton.ml.fork_server", str(run.path)]
    assert launch.command == command
