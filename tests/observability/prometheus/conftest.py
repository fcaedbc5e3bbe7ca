"""Fixtures of the tests with real Prometheus and Alertmanager."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from observed import LiveRun, Served, need

from craton.agent.processes import free_port


@pytest.fixture(autouse=True)
def _no_files_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def programs() -> None:
    need("prometheus")
    need("alertmanager", "prometheus-alertmanager")


@pytest.fixture
def port() -> int:
    """A free one whose third neighbour is free as well."""
    for _ in range(100):
        found = free_port()
        with suppress(OSError), socket.create_server(("127.0.0.1", found + 3)):
            return found
    raise AssertionError("no free ports")


@pytest.fixture
def live_run(tmp_path: Path) -> Iterator[LiveRun]:
    run = LiveRun(tmp_path / "runs", "alpha")
    yield run
    run.close()


@pytest.fixture
def served() -> Iterator[Served]:
    server = Served()
    yield server
    server.close()


@pytest.fixture
def exporter() -> Iterator[Served]:
    server = Served()
    yield server
    server.close()
