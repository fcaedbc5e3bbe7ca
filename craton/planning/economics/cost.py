"""Cost in dollars: of a run with its interval, per trillion tokens, per day, with purchase kind and price date.

Guarantees: a price older than `STALE_PRICE_DAYS` is used with a warning; no price gives no cost and a warning that says
how to add one. The cluster decides which price applies (the user's own first).
"""

from __future__ import annotations

import math
from datetime import date

from craton.formatting import counted, dollars, setting
from craton.infrastructure import STALE_PRICE_DAYS, Instance, Price, price_age_days
from craton.planning.result import CostPlan

BLOCK_EARLY_MINUTES = (
    30  # EC2 ends a capacity block's instances about this long before its end (public AWS samples, 2026)
)
SECONDS_PER_HOUR = 3600.0
SECONDS_PER_DAY = 86400.0


def billed_instances(instance: Instance, num_nodes: int) -> int:
    """Return the number of instances billed: an NVLink domain that spans instances (an UltraServer) is rented whole."""
    if instance.nvlink_domain_gpus <= instance.num_gpus:
        return num_nodes
    per_unit = instance.nvlink_domain_gpus // instance.num_gpus
    return math.ceil(num_nodes / per_unit) * per_unit


def cost_plan(
    price: Price | None,
    num_instances: int,
    run_seconds: float,
    run_seconds_low: float,
    run_seconds_high: float,
    tokens: float,
    today: date,
) -> tuple[CostPlan | None, list[str]]:
    """Return the cost of the run, and warnings about the price.

    `num_instances` is the billed count: `billed_instances` of the planned nodes plus spares, also for an elastic
    cluster. Time is billed by the second, as on EC2; the warning of a capacity block gives its whole days.
    """
    if price is None:
        return None, ["no price is known for this cluster; add one to the cluster file to see the cost"]
    dollars_per_second = price.dollars_per_hour * num_instances / SECONDS_PER_HOUR
    age_days = price_age_days(price, today)
    cost = CostPlan(
        cost_dollars=dollars_per_second * run_seconds,
        cost_dollars_low=dollars_per_second * run_seconds_low,
        cost_dollars_high=dollars_per_second * run_seconds_high,
        dollars_per_day=dollars_per_second * SECONDS_PER_DAY,
        dollars_per_trillion_tokens=dollars_per_second * run_seconds / tokens * 1e12 if tokens > 0 else 0.0,
        dollars_per_hour_per_instance=price.dollars_per_hour,
        purchase=price.kind,
        price_date=price.date.isoformat(),
        price_age_days=age_days,
        price_source=price.source,
        num_instances=num_instances,
    )
    return cost, _warnings(price, cost, age_days, run_seconds)


def _warnings(price: Price, cost: CostPlan, age_days: int, run_seconds: float) -> list[str]:
    result = []
    if age_days > STALE_PRICE_DAYS:
        result.append(
            f"the {price.kind} price is from {price.date.isoformat()}, {age_days} days old: "
            "check it and put your own in the cluster file"
        )
    if price.kind == "spot":
        result.append(
            "spot instances can be reclaimed with two minutes' notice: the plan counts hardware failures only, "
            "interruptions come on top"
        )
    if price.kind == "capacity-block":
        # A block of d days gives d days less the early end.
        days = math.ceil((run_seconds + BLOCK_EARLY_MINUTES * 60) / SECONDS_PER_DAY)
        result.append(
            f"capacity blocks are sold in whole days and end about {setting(60 * BLOCK_EARLY_MINUTES)} early: this run "
            f"needs {counted(days, 'day')}, {dollars(days * cost.dollars_per_day)}"
        )
    return result
