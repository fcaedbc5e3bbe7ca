"""Time to encode and decode messages of a server, compared with pickle: `python benchmarks/serving_wire.py`.

Prints for each message the microseconds of CPU time to encode and decode once, the best of several rounds, and the
ratio. Every step sends output deltas and a batch.
"""

from __future__ import annotations

import pickle
import timeit
from collections.abc import Callable
from time import process_time
from typing import Any

import numpy as np

from craton.ml.serving.device.order_bytes import decode_order, encode_order
from craton.ml.serving.messages import OutputDelta, Sampling, Stats, Submit
from craton.ml.serving.schedule import RowStart, StepInput
from craton.ml.serving.wire import decode, encode

ROUNDS, SECONDS = 7, 0.05


def pieces(count: int) -> list[OutputDelta]:
    return [OutputDelta(number, 0, [number * 17], [-0.123 * number], versions=[0]) for number in range(count)]


def work(count: int, started: int = 0) -> StepInput:
    numbers = np.arange(count, dtype=np.int32)
    return StepInput(
        numbers,
        np.ones(count, np.int32),
        numbers + 300,
        count,
        np.zeros(0, np.int32),
        numbers,
        numbers,
        table=[(row, 5, row * 7) for row in range(count // 16)],
        starts=[RowStart(row, 12345, -1, Sampling(max_tokens=256, temperature=0.7)) for row in range(started)],
        next_tokens=[(row, 17) for row in range(started)],
    )


def best_microseconds(function: Callable[[], Any]) -> float:
    count = max(1, int(SECONDS / max(timeit.timeit(function, number=3) / 3, 1e-7)))
    return min(timeit.repeat(function, number=count, repeat=ROUNDS, timer=process_time)) / count * 1e6


def main() -> None:
    cases: list[tuple[str, Any, Callable[[Any], bytes], Callable[[bytes], Any]]] = [
        *((f"output deltas of {count} requests", pieces(count), encode, decode) for count in (1, 16, 64, 256)),
        ("request of 64 tokens", Submit(1, tuple(range(64))), encode, decode),
        ("request of 8,192 tokens", Submit(1, tuple(range(8192))), encode, decode),
        ("stats", Stats(steps_by_tokens=tuple(range(14))), encode, decode),
        *(
            (f"batch of {count} requests", ("execute", (work(count),)), encode_order, decode_order)
            for count in (1, 16, 64, 256)
        ),
        ("batch that starts 16 requests", ("execute", (work(16, 16),)), encode_order, decode_order),
    ]
    print(f"{'message':<32}{'bytes':>10}{'µs':>10}{'pickle µs':>12}{'ratio':>8}")
    for name, message, write, read in cases:
        ours = best_microseconds(lambda message=message, write=write, read=read: read(write(message)))
        theirs = best_microseconds(lambda message=message: pickle.loads(pickle.dumps(message, -1)))
        print(f"{name:<32}{len(write(message)):>10,}{ours:>10.1f}{theirs:>12.1f}{ours / theirs:>8.2f}")


if __name__ == "__main__":
    main()
