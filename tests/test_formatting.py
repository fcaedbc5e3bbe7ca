"""The table of formats, and that nothing beside craton/formatting.py writes such numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest

import craton
from craton import formatting

GIBIBYTE = 2**30
YEAR = 365.25 * 86400
FORMATS: list[tuple[Callable[..., str], dict[float | None, str]]] = [
    (formatting.digits, {0: "0", 0.00512: "0.00512", 0.9999: "1.00", 5.12: "5.12", 51.2: "51.2", 5120: "5,120"}),
    (formatting.amount, {0: "0", 850: "850", 4590: "4.59k", 999_999: "1.00M", 1.46e6: "1.46M", 1.2e9: "1.20B"}),
    (formatting.count, {850: "850", 2640: "2,640", 12_345: "12.3k", 8.03e9: "8.03B", 1e12: "1T", 15.6e12: "15.6T"}),
    (formatting.loss, {2.5: "2.50", math.inf: "inf"}),
    (
        formatting.duration,
        {
            0: "0 s",
            12e-6: "12.0 µs",
            0.0425: "42.5 ms",
            0.35: "350 ms",
            0.9999: "1.00 s",
            12.1: "12.1 s",
            59.96: "1m",
            104: "1m 44s",
            3599.7: "1h",
            7500: "2h 5m",
            11_520: "3h 12m",
            86_399: "1d",
            356_400: "4d 3h",
            123.4 * 86400: "123d",
            4 * YEAR: "4.00 years",
            -104: "−1m 44s",
        },
    ),
    (formatting.setting, {0.25: "250 ms", 1.5: "1.5 s", 30: "30 s", 60: "1m", 90: "1m 30s", 7200: "2h", 86400: "1d"}),
    (formatting.whole_duration, {0.2: "0 s", 33.4: "33 s", 59.7: "59.7 s", 104: "1m 44s"}),
    (formatting.memory, {512: "512 B", 306 * 1024: "306 KiB", 2**29: "512 MiB", 80 * GIBIBYTE: "80.0 GiB"}),
    (formatting.gibibytes, {80 * GIBIBYTE: "80.0", 0.01 * GIBIBYTE: "0.0100"}),
    (formatting.stored, {0: "0 B", 512: "512 B", 2.55e9: "2.55 GB", 5.68e12: "5.68 TB"}),
    (formatting.bandwidth, {2.5e9: "2.50 GB/s"}),
    (
        formatting.percent,
        {
            0: "0%",
            1e-6: "<0.01%",
            0.0003: "0.03%",
            0.052: "5.2%",
            0.2: "20%",
            0.433: "43%",
            0.9: "90%",
            0.984: "98.4%",
            0.9996: "99.96%",
            0.99999: "99.99%",
            1: "100%",
            1.04: "104%",
        },
    ),
    (formatting.signed_percent, {0: "±0%", 0.031: "+3.1%", -0.21: "−21%", 0.9: "+90%"}),
    (formatting.small_dollars, {8e-6: "$0.000008", 0.0123: "$0.012", 0.1: "$0.10", 0: "$0.00", 24_300: "$24.3k"}),
    (formatting.dollars, {3.2: "$3.20", 850: "$850", 999.7: "$1.00k", 24_300: "$24.3k", 1.3e9: "$1.30B", -5: "−$5.00"}),
]


@pytest.mark.parametrize(("write", "texts"), FORMATS, ids=lambda item: getattr(item, "__name__", ""))
def test_numbers_are_written_in_one_way(write, texts):
    assert {value: write(value) for value in texts} == texts


@pytest.mark.parametrize("write", [write for write, _ in FORMATS if write is not formatting.gibibytes])
def test_what_is_not_known_is_a_dash(write):
    assert write(None) == "–"
    assert write(math.nan) == ("NaN" if write is formatting.loss else "–")


def test_units_of_rates_and_quantities():
    assert formatting.rate(1.46e6, "tokens") == "1.46M tokens/s"
    assert formatting.rate(None, "tokens") == "–"
    assert formatting.with_prefix(7.22e11, "FLOP") == "722 GFLOP"
    assert [formatting.counted(number, "node") for number in (1, 1024)] == ["1 node", "1,024 nodes"]


def test_both_ends_of_a_range_are_in_the_unit_of_the_upper_one():
    assert formatting.duration_range(0.9, 1.1) == "0.9–1.1 s"
    assert formatting.duration_range(0.0812, 0.12) == "81–120 ms"
    assert formatting.duration_range(10_440, 12_240) == "2.9–3.4h"
    assert formatting.duration_range(50, 90) == "50–90 s"
    assert formatting.duration_range(50, math.inf) == "50.0 s or more"
    assert formatting.duration_range(0, 0) == "0 s"
    assert formatting.amount_range(5630, 9470) == "5.63–9.47k"
    assert formatting.dollars_range(21_100, 25_600) == "$21.1–25.6k"
    assert formatting.dollars_range(3.2, 4.1) == "$3.20–4.10"
    assert formatting.percent_range(0.879, 0.956) == "87.9–95.6%"
    assert formatting.percent_range(0.2, 0.4) == "20–40%"
    assert formatting.percent_range(1.0, 1.0) == "100%"
    assert formatting.day_range(date(2027, 2, 4), date(2027, 3, 18)) == "4 Feb – 18 Mar 2027"


def test_a_change_against_the_plan():
    assert [formatting.change(ratio, 1.0) for ratio in (1.03, 0.88, 1.0001, 3.1)] == ["+3%", "−12%", "±0%", "×3.1"]
    assert formatting.change(None, 1.0) == formatting.change(1.0, 0.0) == "–"


UNITS = r"(?:µs|ms|s|min|h|days|KiB|MiB|GiB|[kMGT]B)"
OWN_FORMATS = {
    "a percentage": re.compile(r"[^%]\{[^{}]+:[+,]?\.\d%\}|[^%]\{[^{}]+:[^{}]*\} ?%(?!\()"),
    "a duration or a size": re.compile(rf"[^%]\{{[^{{}}]+:,?\.\d[fg]\}} {UNITS}\b"),
    "dollars": re.compile(r"\$\{[^{}]+:[^{}]*f\}"),
}


def test_product_code_formats_such_numbers_in_one_file():
    folder = Path(craton.__file__).parent
    found = [
        f"{path.relative_to(folder)}:{number}: writes {what} itself; use craton.formatting: {line.strip()}"
        for path in sorted(folder.rglob("*.py"))
        if path != folder / "formatting.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for what, pattern in OWN_FORMATS.items()
        if pattern.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    ['f"{share:.0%}"', 'f"{100 * share:.1f} %"', 'f"{seconds:.1f} s"', 'f"{size / 2**30:.3g} GiB"', 'f"${cost:,.2f}"'],
)
def test_a_second_formatter_would_be_found(line):
    assert any(pattern.search(line) for pattern in OWN_FORMATS.values())
