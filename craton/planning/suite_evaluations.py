"""The seconds of evaluations of a suite between the steps of a training: answers of an engine on every rank, verdicts,
and the weights for the engines.

Answers take the step times of our own engine (`serving`), as rollouts do. Their lengths are not known before a run:
half of the suite's maximum is assumed, and prompts of PROMPT_TOKENS.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

from craton import formatting
from craton.job import Job, JobError
from craton.job.sections.suites import Suite, load_suite
from craton.planning.rates import all_gather_seconds
from craton.planning.rollouts import verdict_seconds
from craton.planning.search import Candidate
from craton.planning.serving import BLOCK_BYTES, ServedModel, own_steps
from craton.planning.setting import Setting
from craton.planning.step import group_of

PROMPT_TOKENS = 128.0  # of a problem, assumed
ASSUMED_PROBLEMS = 500  # of a file that says nothing about it
MAX_ROWS = 1 << 20  # that are counted
MAX_RUNNING = 256  # answers of a rank in a batch


@dataclass(frozen=True)
class SuitePlan:
    """One evaluation."""

    every_steps: int
    problems: int
    samples: int  # of each problem
    answer_tokens: float
    seconds: float
    copy_bytes: float  # of the weights, on each GPU that trains a shard of them
    free_bytes: float  # that training leaves

    @property
    def notes(self) -> list[str]:
        """How it is planned, and whether it may not fit."""
        answers = formatting.counted(self.samples, "answer")
        planned = (
            f"an evaluation of the suite is planned to take {formatting.duration(self.seconds)}, every "
            f"{formatting.counted(self.every_steps, 'step')}: {formatting.counted(self.problems, 'problem')} with "
            f"{answers} of {self.answer_tokens:,.0f} tokens each, half of the maximum"
        )
        if self.copy_bytes <= max(0.0, self.free_bytes):
            return [planned]
        needed, free = formatting.memory(self.copy_bytes), formatting.memory(max(0.0, self.free_bytes))
        return [
            planned,
            f"an evaluation of the suite needs {needed} for a whole copy of the weights, and training leaves {free}; "
            "if it does not fit, evaluate checkpoints with `craton eval`",
        ]


def suite_plan(setting: Setting, candidate: Candidate) -> SuitePlan | None:
    """Return the plan of one evaluation; None without a suite, or if this machine cannot read it."""
    job = setting.job
    wanted = job.train.evaluate if job.train else None
    suite = _suite_of(job)
    if wanted is None or suite is None:
        return None
    sampling = suite.sampling
    samples = wanted.samples or sampling.samples
    bounds = (suite.data.problems, wanted.problems, _num_rows(suite.data.path))
    problems = min(filter(None, bounds), default=ASSUMED_PROBLEMS)
    tokens = sampling.max_tokens / 2
    seconds = (
        _answer_seconds(setting, -(-problems // setting.world), samples, sampling.max_tokens)
        + _verdict_seconds(setting, suite, problems * samples)
        + _gather_seconds(setting, candidate)
    )
    copy = _model(setting).weight_bytes if _num_shards(candidate) > 1 else 0.0
    free = setting.machine.gpu.memory_bytes - candidate.memory_bytes
    return SuitePlan(wanted.every_steps, problems, samples, tokens, seconds, copy, free)


def _suite_of(job: Job) -> Suite | None:
    wanted = job.train.evaluate if job.train else None
    if wanted is None or wanted.suite is None:
        return None
    return _read_suite(wanted.suite, _changed(wanted.suite))


def _changed(path: str) -> float:
    """Return when a file was changed, which tells the cache that it is another one."""
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


@lru_cache(maxsize=16)
def _read_suite(suite: str, changed: float) -> Suite | None:
    try:
        return load_suite(suite)
    except JobError:  # it is on the machines of the ranks
        return None


def _num_rows(path: str | None) -> int | None:
    return None if path is None else _count_rows(path, _changed(path))


@lru_cache(maxsize=16)
def _count_rows(path: str, changed: float) -> int | None:
    """Return the lines of a JSONL file, at most MAX_ROWS; None if they cannot be counted."""
    if not path.endswith(".jsonl") or not Path(path).is_file():  # a pipe would block
        return None
    try:
        with Path(path).open("rb") as file:
            return sum(1 for _ in islice(file, MAX_ROWS)) or None
    except OSError:
        return None


def _model(setting: Setting) -> ServedModel:
    precision = setting.job.precision if setting.job.precision in BLOCK_BYTES else "bf16"
    known = setting.machine.rates.matrix_flops
    return ServedModel(setting.shape, precision if precision in known else "fp32")


def _answer_seconds(setting: Setting, problems: int, samples: int, max_tokens: int) -> float:
    """Return the seconds of prefill, once for each problem, and of decode on the rank with most problems."""
    machine, model = setting.machine, _model(setting)
    timed = own_steps(model, machine)
    answers = problems * samples
    prefill = timed.prompts_seconds(max(1.0, problems * PROMPT_TOKENS), PROMPT_TOKENS)
    tokens, running = answers * max_tokens / 2, min(answers, MAX_RUNNING)
    steps = max(float(max_tokens), tokens / running + max_tokens / 2)
    decode = timed.decode_seconds(max(1.0, tokens / steps), PROMPT_TOKENS + max_tokens / 4)
    slowdown = machine.gpu.cpu.serial_slowdown if machine.gpu.cpu is not None else 1.0
    return slowdown * float(prefill + steps * decode)


def _verdict_seconds(setting: Setting, suite: Suite, answers: int) -> float:
    """Return the seconds of all verdicts, shared by the workers of all nodes."""
    cluster = setting.cluster
    workers = cluster.num_nodes * (suite.verify.workers or max(1, cluster.instance.vcpus))
    return answers * min(sum(map(verdict_seconds, suite.reward)), suite.verify.limit) / workers


def _gather_seconds(setting: Setting, candidate: Candidate) -> float:
    """Return the seconds until every rank has the whole weights."""
    shards, network = _num_shards(candidate), setting.machine.network
    if shards == 1:
        return 0.0
    return all_gather_seconds(_model(setting).weight_bytes, group_of(shards, candidate.layout.cp, network), network)


def _num_shards(candidate: Candidate) -> int:
    layout = candidate.layout
    return layout.fsdp * layout.pp * layout.tp
