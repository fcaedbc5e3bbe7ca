"""The verbs of runs, with no process left after a test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_verbs import Verbs

from craton.cli.views import progress
from craton.orchestration import living_agents
from craton.orchestration.start import kill_run
from craton.telemetry import list_runs


@pytest.fixture(autouse=True)
def _no_progress_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a verb prints does not depend on how long a plan takes on this machine."""
    monkeypatch.setattr(progress, "PLAIN_SECONDS", threading.TIMEOUT_MAX)


@pytest.fixture
def verbs(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Verbs]:
    made = Verbs(monkeypatch, capfd, tmp_path)
    yield made
    for run in list_runs(made.root):
        if living_agents(run):
            kill_run(run)
