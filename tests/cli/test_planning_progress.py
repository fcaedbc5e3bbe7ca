"""Progress goes to stderr: at most two lines in a log, a line that counts in a terminal."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import ClassVar

import pytest
from run_verbs import Verbs

from craton.cli.views import progress as module
from craton.cli.views.progress import progress


class LateTimer:
    """Its moment comes when the test says so."""

    started: ClassVar[list[LateTimer]] = []

    def __init__(self, seconds: float, call: Callable[[], None]) -> None:
        self.seconds, self.call, self.daemon = seconds, call, False

    def start(self) -> None:
        self.started.append(self)

    def cancel(self) -> None: ...

    def join(self) -> None: ...


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> list[LateTimer]:
    monkeypatch.setattr(LateTimer, "started", [])
    monkeypatch.setattr(module.threading, "Timer", LateTimer)
    return LateTimer.started


def test_a_log_has_two_lines_of_what_takes_long_and_none_of_what_is_quick(
    timers: list[LateTimer], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress("planning") as report:
        report(3, 10, "layouts")
    assert capsys.readouterr() == ("", "")
    with progress("planning") as report:
        report(519, 3148, "layouts on p5.48xlarge x 2048")
        timers[-1].call()
        report(520, 3148, "layouts on p5.48xlarge x 2048")
    out, errors = capsys.readouterr()
    first, last = errors.splitlines()
    assert out == ""
    assert first == "planning takes a while: 519 of 3,148 layouts on p5.48xlarge x 2048"
    assert re.fullmatch(r"planning took [0-9.]+ (µs|ms|s)", last)
    with progress("data", in_bytes=True) as report:
        report(1 << 20, 1 << 30)
        timers[-1].call()
    assert "data takes a while: 1.05 MB of 1.07 GB\n" in capsys.readouterr().err


def test_what_fails_has_no_last_line(timers: list[LateTimer], capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with progress("planning"):
            timers[-1].call()
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert capsys.readouterr().err == "planning takes a while\n"


def test_in_a_terminal_the_line_counts_layouts(verbs: Verbs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes stderr for a terminal
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    (verbs.folder / "job.yaml").write_text(
        "kind: pretrain\nmodel: llama-3.1-8b\ndata: {sequence: 8192}\n"
        "train: {global_batch_sequences: 256, steps: 10}\ncluster: p5.48xlarge x 4\n"
    )
    planned = verbs("plan", "job.yaml")
    assert planned.returncode == 0
    screen = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", planned.stderr)
    counts = re.findall(r"([\d,]+)/([\d,]+) \S+ layouts on p5", screen)
    assert counts, "the line stands there"
    assert counts[-1][0] == counts[-1][1], "it ends at all of them"
