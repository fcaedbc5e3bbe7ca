"""Numbers as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from craton.job.document import parse_bytes, parse_count, parse_seconds, parse_token_count, whole_number
from craton.job.document.units import parse_bytes_per_second, parse_flops
from craton.job.sections.serving.load import parse_latency


@pytest.mark.parametrize(
    ("parse", "written", "expected"),
    [
        (parse_count, "15T", 15_000_000_000_000),
        (parse_count, "15.6T", 15_600_000_000_000),
        (parse_count, "1.5B", 1_500_000_000),
        (parse_count, "4k", 4000),
        (parse_count, "1_000", 1000),
        (parse_count, "1,000", 1000),
        (parse_count, "1,234,567.5M", 1_234_567_500_000),
        (parse_count, 1e6, 1_000_000),
        (parse_latency, "500ms", 0.5),
        (parse_latency, "1m 30s", 90),
        (parse_token_count, "4k", 4096),
        (parse_token_count, "8M", 8 * 1024 * 1024),
        (parse_token_count, 8192, 8192),
        (parse_seconds, "5m", 300),
        (parse_seconds, "2d", 172800),
        (parse_seconds, "1h30m", 5400),
        (parse_seconds, "500ms", 0.5),
        (parse_seconds, 90, 90),
        (parse_bytes, "80GiB", 80 * 2**30),
        (parse_bytes, "1.2 TB", 1.2e12),
        (parse_bytes, "81559MiB", 81559 * 2**20),
        (parse_bytes_per_second, "400GB/s", 400e9),
        (parse_bytes_per_second, "3200Gbps", 400e9),
        (parse_bytes_per_second, "3.2 Tb/s", 400e9),
        (parse_bytes_per_second, 55e9, 55e9),
        (parse_flops, "989T", 989e12),
        (parse_flops, "2.25 PFLOPS", 2.25e15),
    ],
)
def test_written_numbers(parse, written, expected) -> None:
    assert parse(written) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("parse", "written", "says"),
    [
        (parse_count, "8X", "'8X' is not a count; write e.g. 4096, 4k, 8M or 15T"),
        (parse_count, "1.0001k", "not a whole number"),
        (parse_count, -3, "-3 is not above zero, so it is not a count; write e.g. 4096"),
        (parse_count, True, "True is not a count"),
        (parse_count, None, "nothing is not a count"),
        (parse_count, "nan", "'nan' is not a count"),
        (parse_token_count, "15T", "powers of 1024"),
        (parse_token_count, "1,5", "'1,5' is not a number of tokens; write e.g. 4096, 8k or 4M (k and M are powers"),
        (parse_token_count, "2,00", "a comma separates thousands, as in 4,096"),
        (parse_count, ",100", "is not a count"),
        (parse_latency, "500", "'500' has no unit; write 500ms or 500s"),
        (parse_latency, 0.5, "0.5 has no unit; write 0.5ms or 0.5s"),
        (parse_latency, "1m30", "'1m30' has no unit; write e.g. 500ms or 2s"),
        (parse_latency, 0, "0 is not above zero"),
        (parse_latency, "0.0001ms", "below a microsecond"),
        (parse_seconds, "5x", "30s, 5m, 1h30m or 2d"),
        (parse_seconds, "soon", "is not a duration"),
        (parse_seconds, "0s", "above zero"),
        (parse_bytes, "80Gb", "is not a size in bytes"),
        (parse_bytes_per_second, "400GB", "is not a rate"),
        (parse_flops, "989 TB", "is not a FLOP rate"),
        (whole_number(1), "4k", "'4k' is not a whole number from 1"),
        (whole_number(1, 8), 9, "9 is not a whole number from 1 to 8"),
    ],
)
def test_slips_are_told_with_how_to_write_it(parse, written, says) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        parse(written)
    assert says in str(caught.value)


@given(st.integers(1, 10**15))
def test_plain_integers_stay_exact(number: int) -> None:
    assert parse_count(number) == parse_count(str(number)) == number
