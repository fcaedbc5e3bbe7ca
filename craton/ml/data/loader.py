"""Micro-batches for one data-parallel rank, made ahead in a thread; the state is one integer.

Step k after `start` takes the global samples [start + k·B, start + (k+1)·B), B = `global_batch`; rank r of `world`
takes the r-th equal slice of them. So any number of ranks sees the same samples in the same step, and a loader that
starts at `state` resumes exactly where another one stopped, whatever its world size was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import Empty, Full, Queue
from types import MappingProxyType, TracebackType
from typing import Self

from numpy.typing import NDArray

from craton.ml.data.errors import DataError
from craton.ml.data.sample import Source, collate

_POLL_SECONDS = 0.1

Arrays = dict[str, NDArray]


class Loader:
    """`next(n)` returns the rank's next n micro-batches; `state` is the first global sample of the next unfinished
    step."""

    phase_seconds: Mapping[str, float] = MappingProxyType({})  # of the last `next`, what is not data loading
    metrics: Mapping[str, float] = MappingProxyType({})  # of the last `next`, for the step's record
    is_step_done = True  # whether the last `next` gave the micro-batches of the step's last optimizer update
    check: Callable[[], None] = staticmethod(lambda: None)  # raises when the generation is over; for long waits
    pending: Sequence[int] = ()  # samples are trained in order

    def __init__(
        self, source: Source, global_batch: int, rank: int, world: int, micro_batch: int, start: int = 0, ahead: int = 4
    ) -> None:
        assert 0 <= rank < world, f"rank {rank} of {world}"
        assert start >= 0, start
        if global_batch % (world * micro_batch):
            raise DataError(
                f"a global batch of {global_batch} sequences cannot be shared by {world} data-parallel ranks in "
                f"micro-batches of {micro_batch}; make it a multiple of {world * micro_batch}"
            )
        self.source = source
        self.global_batch, self.rank, self.world, self.micro_batch = global_batch, rank, world, micro_batch
        self.accumulation = global_batch // (world * micro_batch)  # micro-batches of one step on this rank
        self._start = start
        self._given = 0
        self._queue: Queue[Arrays | BaseException] = Queue(maxsize=max(ahead, self.accumulation))
        self._closed = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._fill, name="craton-loader", daemon=True)
        self._thread.start()

    @property
    def state(self) -> int:
        """Pass it as `start` to resume. A step of which only some micro-batches were taken starts over."""
        return self._start + self._given // self.accumulation * self.global_batch

    def next(self, accumulation: int | None = None) -> list[Arrays]:
        """Return the next micro-batches, by default those of one step. Errors of the source are raised here."""
        batches = []
        for _ in range(self.accumulation if accumulation is None else accumulation):
            batches.append(self._take())
            self._given += 1
        return batches

    def close(self) -> None:
        """Stop the thread after its current sample."""
        self._closed.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _take(self) -> Arrays:
        if self._failure is not None:
            raise self._failure
        while True:
            try:
                item = self._queue.get(timeout=_POLL_SECONDS)
            except Empty:
                assert not self._closed.is_set(), "the loader is closed"
                continue
            if isinstance(item, BaseException):
                self._failure = item
                raise item  # with the traceback it had in the thread
            return item

    def _fill(self) -> None:
        try:
            for indices in self._micro_batches():
                samples = []
                for index in indices:
                    if self._closed.is_set():
                        return
                    samples.append(self.source.sample(index))
                if not self._put(collate(samples)):
                    return
        except BaseException as error:  # noqa: BLE001  (passed to the caller, whatever it is)
            self._put(error)

    def _micro_batches(self) -> Iterator[range]:
        """Yield the global sample indices of each of this rank's micro-batches, endlessly."""
        first = self._start + self.rank * (self.global_batch // self.world)
        while True:
            for number in range(self.accumulation):
                begin = first + number * self.micro_batch
                yield range(begin, begin + self.micro_batch)
            first += self.global_batch

    def _put(self, item: Arrays | BaseException) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=_POLL_SECONDS)
                return True
            except Full:
                continue
        return False
