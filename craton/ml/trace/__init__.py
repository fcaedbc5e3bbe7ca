"""The real training step on fake ranks: what it communicates, computes and holds, at any world size, without a GPU."""

from craton.ml.trace.fake import TraceError
from craton.ml.trace.records import CollectiveTotal, TraceFinding, RankTrace, Trace
from craton.ml.trace.trace import trace

__all__ = ["CollectiveTotal", "TraceFinding", "RankTrace", "Trace", "TraceError", "trace"]
