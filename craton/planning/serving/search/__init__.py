"""Search deployments of a server for a load: layouts, replicas, instances and pools within latency limits, by cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.planning.serving.search.deployments import CHOICES, plan_load, with_planned_load
    from craton.planning.serving.search.result import (
        CurvePoint,
        Deployment,
        FrontPoint,
        Interval,
        KvTier,
        LoadPlan,
        SloMiss,
        best_of_each,
    )
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
