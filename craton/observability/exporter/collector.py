"""Run collectors concurrently, with a time limit and isolated from each other.

A file system whose server is gone and a hung driver block their callers, and neither call can be interrupted. So each
collector has its own thread. When one does not finish in time, its families are missing from the scrape and
`craton_exporter_collector_stuck` is 1; later scrapes do not wait for it, and it is used again once it has returned.
"""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

from craton.observability.exporter.exposition import Sample

ANSWER_SECONDS = 4.0  # below Prometheus's timeout for a scrape interval of five seconds
REASONS_KEPT = 32  # per collector, so that each reason is printed once


class Collector(ABC):
    """Reads one part of the node. Any exception of `collect` is counted, and printed once on stderr."""

    name: str
    errors = 0  # read errors that did not stop the collector
    said: tuple[str, ...] = ()  # the last reasons printed

    @abstractmethod
    def collect(self, now: float) -> Iterable[Sample]:
        """Return the samples of this moment; `now` is in epoch seconds."""

    def close(self) -> None:  # noqa: B027 - most collectors have no resources
        """Release its resources."""

    def guarded(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Yield samples until the first parse or read error; the rest of the collector continues."""
        try:
            yield from samples
        except (ValueError, LookupError, OSError) as error:
            self.errors += 1
            self.say(reason(error))

    def say(self, problem: str) -> None:
        """Print a problem once on stderr: most problems persist from scrape to scrape."""
        if problem not in self.said:
            print(f"{self.name} cannot be read: {problem}", file=sys.stderr, flush=True)
            self.said = (*self.said, problem)[-REASONS_KEPT:]


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class Team:
    """All collectors of an exporter."""

    def __init__(self, collectors: Sequence[Collector], answer_seconds: float = ANSWER_SECONDS) -> None:
        self._workers = [_Worker(collector) for collector in collectors]
        self._answer_seconds = answer_seconds

    def collect(self, now: float) -> Iterator[Sample]:
        deadline = time.monotonic() + self._answer_seconds
        asked = {worker for worker in self._workers if worker.ask(now)}
        for worker in self._workers:
            answer = worker.answer(deadline) if worker in asked else None
            name = (worker.collector.name,)
            yield "craton_exporter_collector_stuck", name, int(answer is None)
            yield "craton_exporter_collector_errors_total", name, worker.errors
            if answer is not None:
                yield "craton_exporter_collector_seconds", name, worker.seconds
                yield from answer

    def close(self) -> None:
        for worker in self._workers:
            worker.end()


class _Worker:
    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        self.seconds = 0.0
        self._failures = 0
        self._asked, self._answered = threading.Event(), threading.Event()
        self._now = 0.0
        self._is_ended = False
        self._samples: list[Sample] = []
        # A daemon thread: a blocked collector must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name=f"collector-{collector.name}", daemon=True)
        self._answered.set()
        self._thread.start()

    @property
    def errors(self) -> int:
        return self._failures + self.collector.errors

    def ask(self, now: float) -> bool:
        """Start a collection; return False while the previous one is still running."""
        if not self._answered.is_set():
            return False
        self._now = now
        self._answered.clear()
        self._asked.set()
        return True

    def answer(self, deadline: float) -> list[Sample] | None:
        if not self._answered.wait(max(0.0, deadline - time.monotonic())):
            return None
        return self._samples

    def end(self) -> None:
        self._is_ended = True
        self._asked.set()

    def _work(self) -> None:
        while True:
            self._asked.wait()
            self._asked.clear()
            if self._is_ended:
                self.collector.close()
                return
            began = time.perf_counter()
            samples: list[Sample] = []
            try:
                # One by one, so that samples before an error are exported.
                for sample in self.collector.collect(self._now):
                    samples.append(sample)  # noqa: PERF402
            except Exception as error:  # noqa: BLE001 - a failing collector must not affect the others
                self._failures += 1
                self.collector.say(reason(error))
            self._samples, self.seconds = samples, time.perf_counter() - began
            self._answered.set()
