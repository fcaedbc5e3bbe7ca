"""Lengths as a user writes them, and what is drawn from them."""

from __future__ import annotations

import numpy as np
import pytest

from craton.bench.load import parse_lengths
from craton.bench.load.errors import WorkloadError
from craton.bench.load.lengths import Lengths


def drawn(text: str, number: int = 4000) -> np.ndarray:
    generator, lengths = np.random.default_rng(0), parse_lengths(text, "--input")
    return np.array([lengths.draw(generator) for _ in range(number)])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512", Lengths("fixed", 512)),
        ("100..1024", Lengths("uniform", 100, 1024)),
        (" 7 .. 7 ", Lengths("uniform", 7, 7)),
        ("normal(512,128)", Lengths("normal", 512, 128)),
        ("lognormal(512.5, 400)", Lengths("lognormal", 512.5, 400)),
    ],
)
def test_reads_and_writes_back(text: str, expected: Lengths) -> None:
    assert parse_lengths(text, "--input") == expected
    assert parse_lengths(str(expected), "--input") == expected


def test_fixed_is_always_the_same() -> None:
    assert set(drawn("512", 10)) == {512}


def test_uniform_reaches_both_ends() -> None:
    found = drawn("3..6")
    assert set(found) == {3, 4, 5, 6}
    assert abs(found.mean() - 4.5) < 0.1


@pytest.mark.parametrize("kind", ["normal", "lognormal"])
def test_mean_and_deviation_are_those_of_the_lengths(kind: str) -> None:
    found = drawn(f"{kind}(1000,200)", 20_000)
    assert abs(found.mean() - 1000) < 10
    assert abs(found.std() - 200) < 10


def test_lognormal_is_skewed_and_normal_is_not() -> None:
    assert np.median(drawn("lognormal(1000,1000)")) < 800
    assert abs(np.median(drawn("normal(1000,100)")) - 1000) < 20


def test_no_length_is_below_one() -> None:
    assert drawn("normal(2,50)").min() == 1


@pytest.mark.parametrize(
    "text", ["", "long", "-5", "1.5", "5..", "normal(5)", "poisson(3,4)", "0", "0..5", "normal(0,5)"]
)
def test_nonsense_is_named(text: str) -> None:
    with pytest.raises(WorkloadError, match=r"^--output "):
        parse_lengths(text, "--output")


def test_a_range_that_goes_down() -> None:
    with pytest.raises(WorkloadError, match="the smaller number of a range first"):
        parse_lengths("9..3", "--input")
