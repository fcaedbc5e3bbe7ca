"""One gang of ranks for every test below this folder; Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported, which parts of torch do as well

sys.path.insert(0, str(Path(__file__).parent))  # so that a rank can import `gang` and the tests' own functions

from gang import Gang


@pytest.fixture(scope="session")
def gang() -> Iterator[Gang]:
    """Four live ranks; they start at the first use."""
    ranks = Gang()
    yield ranks
    ranks.close()
