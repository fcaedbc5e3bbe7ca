"""The verbs of runs, with no process left after a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from run_verbs import Verbs

from craton.orchestration import kill_run, living_agents
from craton.telemetry import list_runs


@pytest.fixture
def verbs(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Verbs]:
    made = Verbs(monkeypatch, capfd, tmp_path)
    yield made
    for run in list_runs(made.root):
        if living_agents(run):
            kill_run(run)
