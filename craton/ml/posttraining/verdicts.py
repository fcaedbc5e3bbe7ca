"""Verdicts on samples: the verifiers' pool of this rank, and reward models, which all ranks score together."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from craton.job import Job
from craton.ml.posttraining.rollouts import wait_for
from craton.ml.posttraining.rows import TrainedSequence
from craton.ml.posttraining.samples import RolloutSample
from craton.ml.verifiers import Verdict, VerifierPool, VerifierSample

if TYPE_CHECKING:
    from craton.ml.posttraining.token_reader import TokenReader

_kept: dict[str, VerifierPool] = {}  # of this process: a generation that breaks does not end its workers


def open_pool(job: Job, folder: Path) -> VerifierPool:
    """Return the pool of this process, with its share of the node's workers. It stays open over generations, so that a
    recovery does not wait for new workers; it ends with the process. `folder`: searched for users' functions first."""
    assert job.rollout is not None
    assert job.verify is not None
    local_ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    workers = job.verify.workers or len(os.sched_getaffinity(0))
    verify = job.verify.model_copy(update={"workers": -(-workers // local_ranks)})
    key = repr((job.reward, verify, str(folder), job.rollout.environment))
    if key not in _kept:
        _kept[key] = VerifierPool(job.reward, verify, folder, environment=job.rollout.environment)
    return _kept[key]


class Rewards:
    """Gives samples their verdicts."""

    def __init__(self, pool: VerifierPool | None, models: Sequence[tuple[str, float, TokenReader]] = ()) -> None:
        """`models`: name, weight and reader of each reward model. Without a pool, samples have no rewards (distill)."""
        self._pool, self._models = pool, models

    @property
    def has_models(self) -> bool:
        return bool(self._models)

    def verify(self, samples: Sequence[RolloutSample], check: Callable[[], None]) -> None:
        """Verify this rank's samples, except those that an environment has judged."""
        if self._pool is None:
            return
        open_samples = [sample for sample in samples if sample.verdict is None]
        futures = [
            self._pool.submit(
                VerifierSample(sample.prompt.content, sample.completion, sample.prompt.row, sample.transcript)
            )
            for sample in open_samples
        ]
        for sample, verdict in zip(open_samples, wait_for(futures, check), strict=True):
            sample.verdict = verdict

    def add_model_rewards(self, samples: Sequence[RolloutSample]) -> None:
        """Add the scores of reward models, read at the last token. All ranks call it with the same samples."""
        for name, weight, reader in self._models:
            for sample, values in zip(samples, reader.read([_scored(sample) for sample in samples]), strict=True):
                score = float(values[-1])
                verdict = sample.verdict or Verdict(0.0)
                reward = None if verdict.reward is None else verdict.reward + weight * score
                sample.verdict = replace(verdict, reward=reward, parts={**verdict.parts, name: score})


def _scored(sample: RolloutSample) -> TrainedSequence:
    """Return the sequence with a token behind it, so that the model reads its last one."""
    tokens = np.array([*sample.tokens, 0], np.int64)
    return TrainedSequence(tokens, np.zeros(len(sample.tokens), np.float32))
