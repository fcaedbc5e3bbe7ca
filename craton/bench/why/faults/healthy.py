"""Healthy runs of varied kinds on a busy machine: every alarm is a false alarm.

Beside each run, busy processes use the machine's cores in bursts, as other jobs of a shared machine do.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from craton.bench.why.faults.environment import Workshop
from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.running import RunningJob
from craton.bench.why.faults.watch import LOOK_SECONDS, SETTLE_LIMIT_SECONDS, Settling, look
from craton.formatting import whole_duration
from craton.observability.diagnosis import Verdict

SIDE_BY_SIDE = 2
WATCH_SECONDS = 15.0  # after it has settled
LAYOUT = {"fsdp": 2, "micro_batch": 4}
SCRIPT = """\
import time

step = 0
while True:
    time.sleep(0.2)
    step += 1
    print(f"step {step} loss {1 / step:.4f}", flush=True)
"""
# A burst of work, then a rest, again and again: {busy} seconds of every {period}.
NEIGHBOUR = (
    "import time\nwhile True:\n until = time.monotonic() + {busy}\n while time.monotonic() < until: pass\n"
    " time.sleep({period} - {busy})"
)
NEIGHBOURS = ((0.3, 1.0), (2.0, 5.0))  # busy seconds, period
# Asks the server for short completions, one after the other.
CLIENT = """\
import json, sys, time, urllib.request

while True:
    body = json.dumps({"model": sys.argv[2], "prompt": "some words", "max_tokens": 8}).encode()
    request = urllib.request.Request(sys.argv[1] + "/v1/completions", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=60).read()
    time.sleep(0.2)
"""


@dataclass(frozen=True)
class HealthyKind:
    name: str
    recipe: JobRecipe
    then: Callable[[RunningJob], None] | None = None  # once it has settled


@dataclass(frozen=True)
class HealthyRecord:
    name: str
    alarms: tuple[Verdict, ...]
    looks: int
    error: str = ""


def _send_requests(job: RunningJob) -> None:
    job.spawn([sys.executable, "-c", CLIENT, job.url, "tiny"])


def _train(name: str, **keys: Any) -> HealthyKind:
    return HealthyKind(name, JobRecipe(keys={"layout": LAYOUT, **keys}))


KINDS = (
    _train("pretrain"),
    HealthyKind("one-rank", JobRecipe(nodes=1)),
    _train("data-parallel", layout={"replicate": 2, "micro_batch": 2}),
    _train("tensor-parallel", layout={"tp": 2, "micro_batch": 4}),
    _train("pipeline-parallel", layout={"pp": 2, "micro_batch": 2}),
    _train("mixture-of-experts", model={"experts": 4, "top_k": 2, "moe_ffn_hidden": 64}),
    _train(
        "evaluating",
        data={"validation": "{data}/validation.txt"},
        train={"evaluate": {"every_steps": 25, "sequences": 16}},
    ),
    _train("saving", checkpoint={"tiers": [{"to": "shared", "every": "5s", "keep": 2}]}),
    HealthyKind("fine-tuning", JobRecipe(kind="sft", keys={"layout": LAYOUT})),
    HealthyKind("lora", JobRecipe(kind="sft", keys={"layout": LAYOUT, "train": {"lora": {"rank": 4}}})),
    HealthyKind(
        "command",
        JobRecipe(
            kind="command",
            keys={"command": [sys.executable, "script.py"], "progress": {"pattern": "step {step} loss {loss}"}},
            files={"script.py": SCRIPT},
        ),
    ),
    HealthyKind(
        "server", JobRecipe(kind="serve", nodes=1, keys={"serve": {"served_name": "tiny"}}), then=_send_requests
    ),
)


def run_healthy(count: int, root: Path, progress: Callable[[int, int, str], None] | None = None) -> list[HealthyRecord]:
    """Run so many healthy runs of all kinds in turn, two side by side, each beside busy processes."""
    workshop = Workshop(root)
    done: list[HealthyRecord] = []

    def run(number: int) -> HealthyRecord:
        record = _watch(KINDS[number % len(KINDS)], number, workshop)
        done.append(record)
        if progress is not None:
            progress(len(done), count, record.name)
        return record

    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        return list(pool.map(run, range(count)))


def _watch(kind: HealthyKind, number: int, workshop: Workshop) -> HealthyRecord:
    folder = workshop.root / "healthy" / str(number)
    unbroken = LiveFault(kind.name, "", "", "", kind.recipe, ExpectedVerdict((), ()))
    alarms: list[Verdict] = []
    looks = 0
    error = ""
    try:
        with workshop.start(kind.recipe, folder, f"healthy-{number}-{os.getpid()}") as job:
            for busy, period in NEIGHBOURS:
                job.spawn([sys.executable, "-c", NEIGHBOUR.format(busy=busy, period=period)])
            settling, settled = Settling(unbroken, job), 0.0
            deadline = time.monotonic() + SETTLE_LIMIT_SECONDS
            while time.monotonic() < deadline and not (settled and time.monotonic() - settled > WATCH_SECONDS):
                began = time.monotonic()
                _, verdict = look(job.run)
                looks += 1
                if verdict.is_alarm:
                    alarms.append(verdict)
                if not settled and settling.is_settled():
                    settled = time.monotonic()
                    if kind.then is not None:
                        kind.then(job)
                time.sleep(max(0.0, LOOK_SECONDS - (time.monotonic() - began)))
            if not settled:
                error = f"{kind.name} did not settle within {whole_duration(SETTLE_LIMIT_SECONDS)}"
    except (OSError, RuntimeError, LookupError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    shutil.rmtree(folder, ignore_errors=True)
    return HealthyRecord(kind.name, tuple(alarms), looks, error)
