"""Dollars a user can check by hand, and the sentences that come with a price."""

from __future__ import annotations

from datetime import date, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from craton.formatting import dollars
from craton.infrastructure import Price, cluster_of
from craton.infrastructure.catalog import instance
from craton.infrastructure.hardware import PurchaseKind
from craton.planning import CostPlan
from craton.planning.economics import billed_instances, cost_plan

DAY = 86400.0
TODAY = date(2026, 11, 15)


def price(kind: PurchaseKind = "on-demand", age_days: int = 10, dollars: float = 60.0) -> Price:
    return Price(dollars, kind, TODAY - timedelta(days=age_days), "us-east-1", "a price list")


def cost(of: Price, days: float = 10.0, instances: int = 16, tokens: float = 2e12) -> tuple[CostPlan, list[str]]:
    seconds = days * DAY
    found, warnings = cost_plan(of, instances, seconds, 0.9 * seconds, 1.2 * seconds, tokens, TODAY)
    assert found is not None
    return found, warnings


def test_dollars_of_a_run() -> None:
    found, warnings = cost(price())
    assert found.cost_dollars == pytest.approx(60 * 16 * 24 * 10)
    assert found.dollars_per_day == pytest.approx(60 * 16 * 24)
    assert found.dollars_per_trillion_tokens == pytest.approx(found.cost_dollars / 2)
    assert found.cost_dollars_low == pytest.approx(0.9 * found.cost_dollars)
    assert found.cost_dollars_high == pytest.approx(1.2 * found.cost_dollars)
    assert warnings == []


def test_kind_date_and_source_are_always_there() -> None:
    found, _ = cost(price("spot", age_days=30))
    assert (found.purchase, found.price_date, found.price_age_days) == ("spot", "2026-10-16", 30)
    assert found.price_source == "a price list"


@pytest.mark.parametrize(("age_days", "warned"), [(0, False), (90, False), (91, True), (400, True)])
def test_prices_older_than_90_days_are_warned_about(age_days: int, warned: bool) -> None:
    _, warnings = cost(price(age_days=age_days))
    assert any(f"{age_days} days old" in text for text in warnings) == warned


def test_spot_says_that_interruptions_come_on_top() -> None:
    _, warnings = cost(price("spot"))
    assert any("two minutes' notice" in text for text in warnings)


@pytest.mark.parametrize(("days", "sold"), [(0.5, 1), (0.99, 2), (6.5, 7), (7.0, 8)])
def test_capacity_blocks_are_whole_days_and_end_early(days: float, sold: int) -> None:
    found, warnings = cost(price("capacity-block"), days=days)
    (text,) = warnings
    assert f"needs {sold} day{'s' if sold > 1 else ''}, {dollars(sold * found.dollars_per_day)}" in text
    assert found.cost_dollars == pytest.approx(days * found.dollars_per_day), "the estimate is by the second"


def test_without_a_price_there_is_no_cost_but_a_sentence() -> None:
    found, warnings = cost_plan(None, 16, DAY, DAY, DAY, 1e12, TODAY)
    assert found is None
    assert "cluster file" in warnings[0]


def test_a_run_without_tokens_has_no_price_per_token() -> None:
    assert cost(price(), tokens=0.0)[0].dollars_per_trillion_tokens == 0.0


def test_the_users_own_price_wins() -> None:
    listed, own = cluster_of("p5.48xlarge", 4), cluster_of("p5.48xlarge", 4, price=Price(31.0, "own", TODAY))
    assert listed.price is not None
    assert own.price is not None
    assert (cost(listed.price)[0].purchase, cost(own.price)[0].purchase) == ("on-demand", "own")
    assert cost(own.price)[0].cost_dollars < cost(listed.price)[0].cost_dollars


@pytest.mark.parametrize(
    ("name", "num_nodes", "billed"),
    [("p5.48xlarge", 5, 5), ("u-p6e-gb200x72", 3, 3), ("p6e-gb200.36xlarge", 18, 18), ("p6e-gb200.36xlarge", 19, 36)],
)
def test_ultraservers_are_rented_whole(name: str, num_nodes: int, billed: int) -> None:
    assert billed_instances(instance(name), num_nodes) == billed


@given(st.floats(0.01, 300), st.integers(1, 5000), st.floats(1.0, 3.0))
def test_longer_or_wider_is_never_cheaper(days: float, instances: int, factor: float) -> None:
    base, _ = cost(price(), days=days, instances=instances)
    assert base.cost_dollars_low <= base.cost_dollars <= base.cost_dollars_high
    assert cost(price(), days=days * factor, instances=instances)[0].cost_dollars >= base.cost_dollars
    assert cost(price(), days=days, instances=instances + 1)[0].cost_dollars > base.cost_dollars
