"""Which runs have ranks on this node: the row that joins what a node shows with the runs on it, GPUs or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from craton.observability.exporter.collector import Collector
from craton.observability.exporter.exposition import Sample
from craton.observability.exporter.runs_here import RunsHere


class RunsCollector(Collector):
    """The thread that looks for runs, for itself and for those who ask whose a GPU is: a shared file system that hangs
    holds it alone."""

    name = "runs"

    def __init__(self, here: RunsHere) -> None:
        self._here = here

    def collect(self, now: float) -> Iterator[Sample]:
        places = Counter((rank.run, rank.run_node) for rank in self._here.look(now).ranks.values())
        for place, ranks in sorted(places.items()):
            yield "craton_node_run_ranks", place, ranks
