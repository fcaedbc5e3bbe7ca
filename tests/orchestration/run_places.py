"""A place for runs that is empty before each test and has no process left after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from craton.orchestration import living_agents
from craton.orchestration.start import kill_run
from craton.orchestration.watching import living_members
from craton.telemetry import list_runs
from craton.telemetry.members import living_manager


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "runs"
    monkeypatch.setenv("CRATON_RUNS", str(folder))
    yield folder
    for run in list_runs(folder):
        if living_agents(run) or living_manager(run) or living_members(run):
            kill_run(run)
