"""Latency of a server under a load, in closed form: TTFT, TPOT and end-to-end percentiles, saturation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.planning.serving.load.closed_tail import ClosedLatencies, closed_latencies
    from craton.planning.serving.load.lengths import TokenLengths
    from craton.planning.serving.load.load import ServedLoad
    from craton.planning.serving.load.open_loop import (
        LIMITS,
        LoadSaturation,
        ServedLatencies,
        ServedReplica,
        open_load,
        saturation,
    )
    from craton.planning.serving.load.queueing import (
        PERCENTILES,
        delayed_percentiles,
        multiserver_wait_seconds,
        waiting_probability,
    )
    from craton.planning.serving.load.steps import ReplicaSteps
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
