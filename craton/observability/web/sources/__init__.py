"""Slow data sources of the page, all cached: summaries, verdicts, schedulers, Prometheus, servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.observability.web.sources.caches import FIRST_SECONDS, Background, Cached, Schedulers
    from craton.observability.web.sources.local_gpus import LocalGpus
    from craton.observability.web.sources.queries import (
        DEADLINE_SECONDS,
        GPU_FAMILIES,
        Answered,
        Prometheus,
        prometheus_address,
    )
    from craton.observability.web.sources.serving import LATENCIES, ServerLook, ServerLooks, look_curves
    from craton.observability.web.sources.summaries import EXAMINED, MAX_NODES, RunRow, Summaries, job_kind
    from craton.observability.web.sources.verdicts import (
        CachedVerdict,
        Late,
        Verdicts,
        agreeing,
        cause_first,
        examine,
        late_of,
        not_examined,
    )
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
