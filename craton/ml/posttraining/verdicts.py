"""Verdicts on samples: of the verifiers of this rank, and of reward models, of which every rank scores a share."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from craton.job.sections.posttraining import RewardTerm, VerifySection
from craton.ml.posttraining.rollouts import wait_for
from craton.ml.posttraining.samples import RolloutSample
from craton.ml.training.parallel import Ranks
from craton.ml.verifiers import Verdict, VerifierPool, VerifierSample

Item = TypeVar("Item")
RewardScores = tuple[str, float, Callable[[Sequence[Sequence[int]]], list[float]]]  # name, weight, scores of token ids

_kept: dict[str, VerifierPool] = {}  # of this process: a generation that breaks does not end its workers


def open_pool(
    reward: Sequence[RewardTerm], verify: VerifySection, folder: Path, environment: str | None = None
) -> VerifierPool:
    """Return the pool of this process, with its share of the node's workers. It stays open over generations, so that a
    recovery does not wait for new workers; it ends with the process. `folder`: searched for users' functions first."""
    local_ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    key = repr((reward, verify, str(folder), environment))
    if key not in _kept:
        _kept[key] = VerifierPool(reward, verify, folder, environment, num_pools=local_ranks)
    return _kept[key]


class Rewards:
    """Gives samples their verdicts."""

    def __init__(self, pool: VerifierPool | None, ranks: Ranks, models: Sequence[RewardScores] = ()) -> None:
        """Without a pool and models, samples have no rewards (distill)."""
        self._pool, self._ranks, self._models = pool, ranks, models

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
        """Add the scores of reward models. All ranks call it with the same samples, and each scores its share."""
        own = range(self._ranks.rank, len(samples), self._ranks.world)
        for name, weight, score in self._models:
            scores = score([samples[index].tokens for index in own])
            for index, value in gather_objects(list(zip(own, scores, strict=True)), self._ranks):
                verdict = samples[index].verdict or Verdict(0.0)
                reward = None if verdict.reward is None else verdict.reward + weight * value
                samples[index].verdict = replace(verdict, reward=reward, parts={**verdict.parts, name: value})


def gather_objects(items: list[Item], ranks: Ranks) -> list[Item]:
    """Return the items of all ranks, in order of rank."""
    if ranks.world == 1:
        return list(items)
    shares: list[list[Item]] = [[] for _ in range(ranks.world)]
    dist.all_gather_object(shares, items)
    return [item for share in shares for item in share]
