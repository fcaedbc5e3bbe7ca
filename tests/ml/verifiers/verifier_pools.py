"""Pools and samples for tests of verifiers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest

from craton.job.sections.posttraining import RewardTerm, VerifySection
from craton.ml.verifiers import VerifierPool, VerifierSample, probe_isolation

REPORT = probe_isolation()
needs_isolation = pytest.mark.skipif(REPORT.isolation is None, reason=REPORT.describe())
ISOLATIONS = [
    pytest.param(
        "bubblewrap",
        marks=pytest.mark.skipif(
            REPORT.isolation != "bubblewrap", reason=f"bubblewrap: {REPORT.reasons.get('bubblewrap', '')}"
        ),
    ),
    pytest.param("namespaces", marks=needs_isolation),
]


def choose_isolation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pools that start from now on use this isolation."""
    if name == "namespaces" and shutil.which("bwrap"):
        monkeypatch.setenv("PATH", "/nothing-is-here")


def open_pool(
    *terms: dict[str, Any], folder: Path | None = None, environment: str | None = None, **verify: Any
) -> VerifierPool:
    settings = VerifySection.model_validate({"limit": 60, "workers": 2, **verify})
    return VerifierPool([RewardTerm.model_validate(term) for term in terms], settings, folder, environment)


def sample(completion: str, prompt: str = "What is it?", **row: Any) -> VerifierSample:
    return VerifierSample(prompt, completion, row)


def processes_below(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def processes_with(word: str) -> list[int]:
    """Processes of this machine whose command line has a word."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any(word in part for part in process.info["cmdline"] or [])
    ]
