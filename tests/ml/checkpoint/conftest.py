"""Ranks write one file on any machine, for every test below this folder."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more cores there would be more, and tests name the one that they harm."""
    monkeypatch.setattr("craton.ml.training.checkpoint.checkpointer.file_threads", lambda: 1)
