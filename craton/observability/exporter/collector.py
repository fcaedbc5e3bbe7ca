"""How collectors are asked: side by side, with a time limit, none of them able to take the others down.

A file system whose server is gone blocks whoever looks at it, a driver that hangs blocks whoever asks it, and neither
can be interrupted. So each collector has a thread of its own. One that does not come back in time is left where it is:
its families are missing from the scrape, `craton_exporter_collector_stuck` says so, later scrapes do not wait for it,
and it is asked again once it is back.
"""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

from craton.observability.exporter.exposition import Sample

ANSWER_SECONDS = 4.0  # below Prometheus's own limit at a scrape every five seconds
REASONS_KEPT = 32  # of a collector, so that each is said once


class Collector(ABC):
    """A part of the node. `collect` may raise what it likes: it is counted, and said once on the error output."""

    name: str
    errors = 0  # what it could not read and went on without
    said: tuple[str, ...] = ()  # why, the last of it

    @abstractmethod
    def collect(self, now: float) -> Iterable[Sample]:
        """What it sees at this moment, in epoch seconds."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Gives back what it holds."""

    def guarded(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Samples up to the first that cannot be made out of what a file says; the rest of the collector goes on."""
        try:
            yield from samples
        except (ValueError, LookupError, OSError) as error:
            self.errors += 1
            self.say(reason(error))

    def say(self, problem: str) -> None:
        """On the error output, once: a reason mostly stays from scrape to scrape."""
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
        # A daemon: one that never comes back must not keep the process.
        self._thread = threading.Thread(target=self._work, name=f"collector-{collector.name}", daemon=True)
        self._answered.set()
        self._thread.start()

    @property
    def errors(self) -> int:
        return self._failures + self.collector.errors

    def ask(self, now: float) -> bool:
        """Whether it takes the question; one that has not answered the last does not."""
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
                # One by one: what was read before something failed is served.
                for sample in self.collector.collect(self._now):
                    samples.append(sample)  # noqa: PERF402
            except Exception as error:  # noqa: BLE001 - whatever a part of the node does, the others are served
                self._failures += 1
                self.collector.say(reason(error))
            self._samples, self.seconds = samples, time.perf_counter() - began
            self._answered.set()
