"""When the requests of an open load are due."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from craton.bench.load import Open, Sweep, parse_sweep
from craton.bench.load.errors import WorkloadError


def gaps(load: Open, seed: int = 0, stream: int = 0) -> np.ndarray:
    return np.diff(list(islice(load.times(seed, stream), 20_000)))


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (4.0, 0.5), (0.25, 2.0)])
def test_the_rate_is_kept_and_burstiness_is_the_shape_of_the_gaps(burstiness: float, variation: float) -> None:
    """Deviation over mean is 1/sqrt(shape); of Poisson arrivals it is 1."""
    found = gaps(Open(10.0, burstiness))
    assert found.mean() == pytest.approx(0.1, rel=0.05)
    assert found.std() / found.mean() == pytest.approx(variation, rel=0.05)


def test_the_first_is_due_at_once() -> None:
    assert next(Open(0.001).times(0, 0)) == 0.0


def test_arrivals_are_a_function_of_seed_and_load() -> None:
    assert (gaps(Open(5), 1, 2) == gaps(Open(5), 1, 2)).all()
    assert (gaps(Open(5), 1, 2) != gaps(Open(5), 1, 3)).any()
    assert (gaps(Open(5), 2, 2) != gaps(Open(5), 1, 2)).any()


def test_a_sweep_is_read() -> None:
    assert parse_sweep("1..64") == Sweep(1, 64)
    assert parse_sweep(" 0.5 .. 2 ", 0.3) == Sweep(0.5, 2, 0.3)


@pytest.mark.parametrize("text", ["", "5", "64..1", "0..5", "3..3", "a..b", "1,2,4"])
def test_a_sweep_that_is_none(text: str) -> None:
    with pytest.raises(WorkloadError, match=r"write 1\.\.64"):
        parse_sweep(text)
