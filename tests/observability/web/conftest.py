"""The page in a server of its own, and one browser for all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Browser
from page_server import PageServer


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
