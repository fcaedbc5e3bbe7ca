"""The examples of scripts that know nothing of Craton, and what they say of themselves in the logs of their runs."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import psutil
import yaml

from craton.job import Job, parse_job
from craton.telemetry import RunDirectory
from craton.telemetry.files import read_lines

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, SAVED_EVERY = 60, 5


def example(script: str, **more: object) -> Job:
    """The example with fewer steps, and other words at its top."""
    document = {**yaml.safe_load((EXAMPLES / f"{script}.yaml").read_text()), **more}
    document["command"] += [f"--steps={STEPS}", f"--save-every={SAVED_EVERY}", "--step-seconds=0.05"]
    return parse_job(yaml.safe_dump(document), f"{script}.yaml", EXAMPLES)


def processes(run: RunDirectory, node: str) -> list[psutil.Process]:
    """What the agent of a node has started last."""
    started = [line["pid"] for line in read_lines(run.events_path(node))[0] if line["event"] == "rank_started"]
    return [psutil.Process(pid) for pid in started if psutil.pid_exists(pid)]


def beginnings(run: RunDirectory) -> list[int]:
    """After which steps the script has gone on."""
    return [int(step) for step in re.findall(r"resume after step (\d+)", run.log_path(0).read_text())]


def losses(run: RunDirectory) -> dict[int, set[str]]:
    """Step → what was printed as its loss, each time it was done."""
    found: dict[int, set[str]] = defaultdict(set)
    for step, loss in re.findall(r"step (\d+)/\d+  loss (\S+)", run.log_path(0).read_text()):
        found[int(step)].add(loss)
    return found
