"""kill -9 at seeded moments of snapshot after snapshot: what was whole is never lost, what comes back is one step."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from keepers import Keepers

NUMBERS = 600_000  # of three tensors of fp32: a copy, its sums and its push take some milliseconds each


class Lives:
    """Ranks that live one after another, each until it is killed."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("peer_saver.py"))]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )

    def live(self, keeper: str, buddy: str | None, generation: int, steps: int, seconds: float) -> tuple[int, int]:
        """(the step it went on from, the newest that it knew to be whole when it was killed), killed some seconds after
        it had kept so many steps."""
        assert self._process.stdin is not None
        work = {"keeper": keeper, "buddy": buddy, "generation": generation, "numbers": NUMBERS}
        self._process.stdin.write(json.dumps(work) + "\n")
        self._process.stdin.flush()
        pid, word, restored = self._line()
        assert word == "restored", "a rank ended before it had restored"
        kept = restored
        for _ in range(steps):
            _, word, kept = self._line()
            assert word == "kept"
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
        while (said := self._line())[1] != "ended":
            kept = said[2]
        return restored, kept

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _line(self) -> tuple[int, str, int]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process that forks ranks has ended"
        pid, word, step = line.split()
        return int(pid), word, int(step)


@pytest.fixture
def lives() -> Iterator[Lives]:
    made = Lives()
    yield made
    made.close()


def many_lives(lives: Lives, keepers: Keepers, count: int, seed: int) -> None:
    keeper, buddy = keepers.start("node-0"), keepers.start("node-1")
    moments = random.Random(seed)
    known = 0
    for generation in range(1, count + 1):
        steps, seconds = moments.randrange(4), moments.uniform(0.0, 0.05)
        restored, kept = lives.live(keeper.name, buddy.address, generation, steps, seconds)
        assert restored >= known, "a step that was known to be whole is lost"
        known = max(kept, restored)
    assert known > count, "hardly anything was saved: the test proves nothing"
    keeper.kill()
    restored, _ = lives.live(buddy.name, None, count + 1, 0, 0.0)
    assert restored >= known - 1, "the buddy has the copy of what was whole"


def test_a_rank_killed_at_any_moment_leaves_a_whole_step(lives: Lives, keepers: Keepers) -> None:
    many_lives(lives, keepers, 6, seed=5)


@pytest.mark.slow
def test_a_rank_killed_at_many_moments_leaves_a_whole_step(lives: Lives, keepers: Keepers) -> None:
    many_lives(lives, keepers, 100, seed=6)
