"""A rank records without ever waiting or failing for it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from craton.telemetry import RunDirectory
from craton.telemetry.files import read_lines
from craton.telemetry.rank import Recorder


def drain(descriptor: int) -> list[dict[str, object]]:
    os.set_blocking(descriptor, False)
    data = b""
    try:
        while True:
            piece = os.read(descriptor, 1 << 16)
            if not piece:
                break
            data += piece
    except BlockingIOError:
        pass
    return [json.loads(line) for line in data.splitlines()]


@pytest.fixture
def pipe() -> tuple[int, int]:
    return os.pipe()


def test_every_call_is_one_line_for_the_agent(pipe: tuple[int, int]) -> None:
    recorder = Recorder("a", 3, 2, descriptor=pipe[1])
    recorder.metrics(5, run_loss=1.5, step_name="x")
    recorder.event("checkpoint_saved", 5, tier="shared")
    recorder.ledger(5, {"productive": 2.0})  # the agent knows it from the page
    metrics, event = drain(pipe[0])
    assert (metrics["to"], metrics["step"], metrics["generation"], metrics["run_loss"]) == ("metrics", 5, 2, 1.5)
    assert isinstance(metrics["time"], float)
    assert 0 <= metrics["run_recording_share"] < 1  # type: ignore[operator]
    assert metrics["run_dropped_records"] == 0, "served from the start, or the first loss is no increase"
    assert (event["to"], event["event"], event["tier"]) == ("events", "checkpoint_saved", "shared")


def test_a_full_pipe_drops_and_counts_and_recovers(pipe: tuple[int, int]) -> None:
    recorder = Recorder("a", 0, 0, descriptor=pipe[1])
    for step in range(5000):
        recorder.metrics(step, run_loss=1.0)
    assert recorder.dropped > 0
    received = drain(pipe[0])
    assert len(received) + recorder.dropped == 5000
    recorder.metrics(5000, run_loss=1.0)
    (last,) = drain(pipe[0])
    assert last["run_dropped_records"] == recorder.dropped


def test_a_line_longer_than_the_pipe_arrives_in_pieces(pipe: tuple[int, int]) -> None:
    recorder = Recorder("a", 0, 0, descriptor=pipe[1])
    recorder.event("traceback", 1, text="x" * 100_000)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(b"".join(iter(lambda: os.read(pipe[0], 1 << 16), b""))))
    reader.start()
    while recorder._rest:
        recorder.event("later", 2)
    os.close(pipe[1])
    reader.join()
    lines = [json.loads(line) for line in received[0].splitlines()]
    assert len(lines[0]["text"]) == 100_000
    assert {line["event"] for line in lines[1:]} == {"later"}


def test_an_agent_that_is_gone_does_not_hurt(pipe: tuple[int, int]) -> None:
    recorder = Recorder("a", 0, 0, descriptor=pipe[1])
    os.close(pipe[0])
    recorder.metrics(1, run_loss=1.0)
    assert recorder.dropped == 1


def test_values_that_json_does_not_have(pipe: tuple[int, int]) -> None:
    recorder = Recorder("a", 0, 0, descriptor=pipe[1])
    loop: list[object] = []
    loop.append(loop)
    recorder.metrics(1, run_loss=math.nan, run_mfu=np.float32(0.5), run_tokens=np.int64(7), worst=np.float64("inf"))
    recorder.event("odd", 1, path=Path("/a"), values=[1.0, math.inf], itself=loop)
    recorder.event("odd", 1, path=Path("/a"), values=[1.0, math.inf], many=np.arange(3))
    metrics, event = drain(pipe[0])
    assert (metrics["run_loss"], metrics["run_mfu"], metrics["run_tokens"], metrics["worst"]) == (None, 0.5, 7, None)
    assert (event["path"], event["values"], event["many"]) == ("/a", [1.0, None], "[0 1 2]")
    assert recorder.dropped == 1


def test_without_an_agent_the_run_directory_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory.create(tmp_path, "a")
    for name, value in {"CRATON_RUN": str(run.path), "CRATON_NODE": "n", "RANK": "2", "CRATON_GENERATION": "4"}.items():
        monkeypatch.setenv(name, value)
    # A process started by a rank inherits the variable, but not the pipe.
    monkeypatch.setenv("CRATON_RECORDS", "987")
    recorder = Recorder.from_environment()
    recorder.metrics(1, run_loss=0.5)
    recorder.event("hello", 1)
    recorder.close()
    (line,), _ = read_lines(run.metrics_path("n"))
    assert (line["node"], line["rank"], line["generation"], line["run_loss"]) == ("n", 2, 4, 0.5)
    assert read_lines(run.events_path("n"))[0][0]["event"] == "hello"


def test_without_a_run_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CRATON_RUN", "CRATON_RECORDS"):
        monkeypatch.delenv(name, raising=False)
    recorder = Recorder.from_environment()
    recorder.metrics(1, run_loss=1.0)
    assert recorder.dropped == 0


def test_recording_is_cheap_and_says_what_it_costs(pipe: tuple[int, int]) -> None:
    """A line of 13 values takes 12 to 15 µs of CPU on a shared cloud core; the limit leaves room for a busy one."""
    recorder = Recorder("a", 0, 0, descriptor=pipe[1])
    values = {f"run_value_{index}": 1.0 / (index + 1) for index in range(13)}
    best = math.inf
    for _ in range(10):
        before = recorder.recording_seconds
        for step in range(100):
            recorder.metrics(step, **values)
        best = min(best, (recorder.recording_seconds - before) / 100)
        drain(pipe[0])
    assert recorder.dropped == 0
    assert best < 100e-6


def test_the_package_imports_nothing_heavy() -> None:
    code = """
import sys
import craton.telemetry
assert not {"torch", "numpy", "prometheus_client", "yaml", "pydantic"} & set(sys.modules)
import craton.agent
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
