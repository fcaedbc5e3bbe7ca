"""The page in a server of its own, and one browser for all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Browser, Tab
from page_server import PageServer
from simulated_runs import write_run

from craton.observability.web.actions import ActionOutcome
from craton.telemetry import RunDirectory


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRATON_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CRATON_PROMETHEUS", raising=False)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., PageServer]]:
    """`serve()` serves the runs in the test's folder `runs`."""
    servers: list[PageServer] = []

    def start(root: Path | None = None, **options: Any) -> PageServer:
        folder = root or tmp_path / "runs"
        folder.mkdir(exist_ok=True)
        servers.append(PageServer(folder, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine: the page is not opened in a browser")
    with Browser() as opened:
        yield opened


@pytest.fixture
def changes() -> list[tuple[str, str]]:
    """(action, run) of each change that `page` was asked for."""
    return []


@pytest.fixture
def page(serve: Callable[..., PageServer], tmp_path: Path, changes: list[tuple[str, str]]) -> PageServer:
    """A page whose changes are only noted."""
    write_run(tmp_path / "runs", "one", steps=3)

    def note(action: str, run: RunDirectory) -> ActionOutcome:
        changes.append((action, run.name))
        return ActionOutcome(True, "noted")

    return serve(do=note)


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    """A page at a desk; at the end its console must be silent."""
    opened = browser.open()
    opened.resize(1400, 1000)
    opened.prefer("light")
    yield opened
    errors = opened.errors
    opened.close()
    assert errors == []
