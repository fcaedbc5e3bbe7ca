"""Dollars: of a run with its interval, of a trillion tokens, of a day, with the purchase kind and the price's date.

Guarantees: a price older than `STALE_PRICE_DAYS` is used and warned about; no price gives no cost, and a sentence that
says how to state one. Which price is planned with (the user's own first) is the cluster's choice.
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
    """Instances paid for: an NVLink domain that spans instances (an UltraServer) is rented whole."""
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
    """What the run costs, and what to know about the price.

    `num_instances` is what is paid for (`billed_instances` of the nodes the plan runs on and of the spares beside them;
    an elastic cluster is paid by them too). Time is billed by the second, as EC2 does; a capacity block's whole days
    are in its warning.
    """
    if price is None:
        return None, ["no price is known for this cluster: state one in the cluster file to see dollars"]
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
            f"the {price.kind} price is of {price.date.isoformat()}, {age_days} days old: "
            "check it and state your own in the cluster file"
        )
    if price.kind == "spot":
        result.append(
            "spot instances can be taken back with two minutes' notice: the failures planned here are hardware's only, "
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
