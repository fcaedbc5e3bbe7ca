"""Kill -9 in the middle of a save loses nothing that was complete; a flipped bit is found wherever it is."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO

import pytest
from s3 import S3Server
from saver import state_of
from states import Files, equal, numbers, single, tier_of
from waiting import PATIENCE_SECONDS

from craton.ml.training.checkpoint import TierFolder

KINDS = ("nvme", "shared", "s3")
NUMBERS = 1_500_000  # of 4 bytes, twice: three parts in S3


class Saver:
    """The process of saver.py."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("saver.py"))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in: IO[str] = self._process.stdin
        self._out: IO[str] = self._process.stdout

    def save(self, tier: TierFolder, step: int, kill_after: float | None = None) -> float | None:
        """The seconds that the save took; None when it was killed first."""
        environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        written = {**asdict(tier), "path": str(tier.path)}
        work = {"tier": written, "step": step, "numbers": NUMBERS, "environment": environment}
        self._in.write(json.dumps(work) + "\n")
        self._in.flush()
        process, word, *_ = self._out.readline().split()
        assert word == "began"
        if kill_after is not None:
            time.sleep(kill_after)
            with suppress(ProcessLookupError):  # it was done before
                os.kill(int(process), signal.SIGKILL)
        seconds = None
        while (words := self._out.readline().split())[1] != "ended":
            seconds = float(words[2])
        return seconds

    def close(self) -> None:
        self._in.close()
        self._out.close()
        self._process.wait(PATIENCE_SECONDS)


@pytest.fixture(params=[pytest.param(kind, marks=pytest.mark.slow if kind == "nvme" else ()) for kind in KINDS])
def tier(request: pytest.FixtureRequest, tmp_path: Path, bucket: str) -> TierFolder:
    place = f"{bucket}/run" if request.param == "s3" else tmp_path / "tier"
    return tier_of(request.param, place, 0, keep=2)


@pytest.fixture(scope="module")
def saver() -> Iterator[Saver]:
    process = Saver()
    yield process
    process.close()


def kill_saves(saver: Saver, tier: TierFolder, points: int, at_least: int) -> None:
    """Kills saves at seeded moments and checks what is left after each, until so many of them were cut off: on a busy
    machine the blow comes too late for most."""
    complete, seconds = 0, 0.0
    for step in (1, 2):
        seconds = saver.save(tier, step) or 0.0
        complete = step
    moments = random.Random(5)
    cut_off = 0
    for step in range(3, 3 + 20 * points):
        if step >= 3 + points and cut_off >= at_least:
            break
        done = saver.save(tier, step, moments.uniform(0, 1.1 * seconds))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # leftovers are told; they are what this is about
            checkpointer = single([tier])
        found = {name: tensor.zero_() for name, tensor in state_of(0, NUMBERS).items()}
        counters = checkpointer.restore(found)
        assert counters is not None
        assert checkpointer.restored is not None
        assert checkpointer.restored.passed_over == (), "what was cut off does not look like a checkpoint"
        if done is not None:
            assert counters["step"] == step
        assert counters["step"] in (complete, step), f"step {complete} was complete and is lost"
        assert counters["samples"] == counters["step"] * 8
        assert equal(found, state_of(counters["step"], NUMBERS))
        cut_off += counters["step"] != step
        complete = counters["step"]
        checkpointer.close()
    assert cut_off >= at_least


def test_a_killed_save_costs_that_save_only(saver: Saver, tier: TierFolder) -> None:
    kill_saves(saver, tier, 6, at_least=1)


@pytest.mark.slow
def test_fifty_killed_saves_cost_those_saves_only(saver: Saver, tier: TierFolder) -> None:
    kill_saves(saver, tier, 50, at_least=11)


def flip_bits(tier: TierFolder, tmp_path: Path, server: S3Server, places: int) -> None:
    """One bit after another, in every kind of file: each is found, and the same step of the lower tier used."""
    lower = TierFolder("lower", tmp_path / "lower")
    single([tier, lower]).save(2, numbers(2), {"samples": 16}, wait=True)
    files = Files(tier, 2, server)
    assert {Path(name).suffix for name in files.names} == {"", ".json", ".distcp"}
    chosen = random.Random(11)
    checkpointer = single([tier, lower])
    for number in range(places):
        name = files.names[number % len(files.names)]
        good = files.read(name)
        bit = chosen.randrange(8 * len(good))
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        files.write(name, bytes(bad))
        found = numbers(0)
        with pytest.warns(UserWarning, match=f"tier {tier.name}: step 2 cannot be used: .*{Path(name).name}"):
            assert checkpointer.restore(found) == {"samples": 16, "step": 2}
        assert checkpointer.restored is not None
        assert checkpointer.restored.tier == "lower", f"bit {bit} of {name} was not found"
        assert equal(found, numbers(2))
        files.write(name, good)
    assert checkpointer.restore(numbers(0)) == {"samples": 16, "step": 2}
    assert checkpointer.restored is not None
    assert checkpointer.restored.tier == tier.name
    checkpointer.close()


def test_flipped_bits_are_found(tier: TierFolder, tmp_path: Path, s3_server: S3Server) -> None:
    flip_bits(tier, tmp_path, s3_server, 12)


@pytest.mark.slow
def test_fifty_flipped_bits_are_found(tier: TierFolder, tmp_path: Path, s3_server: S3Server) -> None:
    flip_bits(tier, tmp_path, s3_server, 50)
