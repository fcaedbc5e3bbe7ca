"""The S3 server of the tests, and ranks that write one file on any machine, for every test below this folder."""

from __future__ import annotations

import pytest
from s3 import bucket, faults, s3_server

__all__ = ["bucket", "faults", "s3_server"]


@pytest.fixture(autouse=True)
def one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more cores there would be more, and tests name the one that they harm."""
    monkeypatch.setattr("craton.ml.training.checkpoint.file_threads", lambda: 1)
