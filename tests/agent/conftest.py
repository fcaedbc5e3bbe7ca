"""A run for every test, and no agent left after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_gang import Gang


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Gang]:
    made = Gang(tmp_path)
    yield made
    made.end()
