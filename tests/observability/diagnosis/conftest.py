"""A place for runs that is empty before each test and has no process left after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from craton.orchestration import living_agents
from craton.orchestration.start import kill_run
from craton.telemetry import list_runs


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "runs"
    monkeypatch.setenv("CRATON_RUNS", str(folder))
    monkeypatch.delenv("CRATON_PROMETHEUS", raising=False)
    yield folder
    for run in list_runs(folder):
        if living_agents(run):
            kill_run(run)
