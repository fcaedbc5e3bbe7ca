"""The Slurm and the stand-in for Kubernetes that the tests of orchestration have, and a place for runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "orchestration"))

from kubernetes_standin import StandIn
from run_places import root  # noqa: F401 - a fixture of every test
from slurm_lab import slurm, slurm_lab  # noqa: F401 - fixtures of every test


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    standin = StandIn(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(standin.kubeconfig))
    yield standin
    standin.shutdown()
    standin.server_close()
