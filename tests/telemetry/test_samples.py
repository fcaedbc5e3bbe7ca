"""Sample texts of a run: few, short, and safe to read whatever is in the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from craton.telemetry import RunDirectory
from craton.telemetry.rank import SampleRecorder, read_samples, samples


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "a")


def test_a_step_has_a_few_samples_with_their_verdicts(run: RunDirectory) -> None:
    recorder = SampleRecorder(run, "node-0", generation=2, per_step=2)
    for _copy in range(3):
        recorder.record(1, "1+1=", "2", 1.0, {"math": 1.0}, tokens=3, versions=[4, 4, 5])
    assert recorder.is_full(1)
    chat = [{"role": "user", "content": "hello"}]
    recorder.record(2, chat, "x" * 9000, None, {"math": None}, error="timeout after 10 s", tokens=4500)
    recorder.close()
    lines = [json.loads(line) for line in run.samples_path("node-0").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 1, 2]
    assert (lines[0]["generation"], lines[0]["versions"]) == (2, [4, 5])
    newest = read_samples([run.samples_path("node-0")], 2)
    assert [sample["step"] for sample in newest] == [2, 1]
    assert (newest[0]["prompt"], newest[0]["reward"], newest[0]["error"]) == ("user: hello", None, "timeout after 10 s")
    assert len(newest[0]["completion"]) < samples.MAX_TEXT + 50


def test_what_is_torn_or_strange_in_the_file_is_skipped(run: RunDirectory) -> None:
    recorder = SampleRecorder(run, "node-0", generation=0)
    recorder.record(7, "p", "c", float("nan"))
    recorder.close()
    with open(run.samples_path("node-0"), "ab") as file:
        file.write(b'{"step": 8, "prompt": 5, "completion": "c"}\n[]\n\xff\xfe\n')
        file.write(
            b'{"step": 9, "prompt": "p", "completion": "c", "reward": "high", "parts": 3, "versions": ["a", 1]}\n'
        )
        file.write(b'{"step": 10, "prompt": "p", "comp')
    found = read_samples([run.samples_path("node-0"), run.samples_path("node-1")], 10)
    assert [sample["step"] for sample in found] == [9, 7]
    assert (found[0]["reward"], found[0]["parts"], found[0]["versions"]) == (None, {}, [1])
    assert found[1]["reward"] is None


def test_the_file_keeps_its_newest_half(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MAX_BYTES", 20_000)
    recorder = SampleRecorder(run, "node-0", generation=0)
    for step in range(300):
        recorder.record(step, "p" * 100, "c" * 100, 0.5)
    recorder.close()
    assert run.samples_path("node-0").stat().st_size < 21_000
    found = read_samples([run.samples_path("node-0")], 1000)
    assert found[0]["step"] == 299
    assert [sample["step"] for sample in found] == list(range(299, 299 - len(found), -1))
