"""One gang of ranks for every test below this folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # so that a rank can import `gang` and the tests' own functions

from gang import Gang


@pytest.fixture(scope="session")
def gang() -> Iterator[Gang]:
    """Four live ranks; they start at the first use."""
    ranks = Gang()
    yield ranks
    ranks.close()
