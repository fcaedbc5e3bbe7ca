"""The samples of a step in mode sync: every rank generates and verifies its share, then all ranks have all samples.

A step takes the next prompts in order, from the newest weights. With `filter: equal`, groups of equal rewards are
replaced by further prompts, in order, until the step is full; the next step begins behind the last prompt drawn. So the
state is one integer, and a step that is repeated after a fault gives the same samples.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from craton.errors import CratonError
from craton.job.sections.posttraining import Rollout
from craton.ml.data import PromptSource
from craton.ml.posttraining.rollouts import Rollouts
from craton.ml.posttraining.samples import RolloutSample, StepSamples, has_unequal_rewards
from craton.ml.posttraining.shared import RolloutEngine
from craton.ml.posttraining.verdicts import Rewards, gather_objects
from craton.ml.training.parallel import Ranks
from craton.ml.verifiers import Verdict, judge_failures
from craton.telemetry import with_label
from craton.telemetry.rank import LedgerClock

MAX_DRAWS = 20  # prompts that `filter: equal` may draw, per prompt of a step
TAIL_SHARE = 0.1  # of the samples: while fewer are unfinished, generation is in its tail


class EqualRewardsError(CratonError):
    """Nearly all groups have equal rewards, so there is nothing to learn from."""


class SynchronousSamples:
    """Draws the samples of one step after another. All ranks call `draw` together."""

    def __init__(
        self,
        engine: RolloutEngine,
        prompts: PromptSource,
        rollouts: Rollouts,
        rewards: Rewards,
        rollout: Rollout,
        seed: int,
        ranks: Ranks,
        clock: LedgerClock,
    ) -> None:
        self._engine, self._prompts, self._rollouts, self._rewards = engine, prompts, rollouts, rewards
        self._rollout, self._seed, self._ranks, self._clock = rollout, seed, ranks, clock
        self.pending: Sequence[int] = ()  # prompts are trained in order

    def close(self) -> None:
        """There is nothing to end: `draw` leaves no request behind."""

    def draw(self, first: int, check: Callable[[], None]) -> StepSamples:
        """Return the samples of the step that begins with prompt `first`."""
        wanted, group = self._rollout.prompts, self._rollout.group
        seconds = dict.fromkeys(("sync", "rollout", "reward"), 0.0)
        with self._phase("sync", seconds):
            self._engine.refresh(self._clock.page.step)
        kept: list[RolloutSample] = []
        drawn: list[RolloutSample] = []
        following, warning = first, ""
        while len(kept) < wanted * group:
            indices = range(following, following + wanted - len(kept) // group)
            samples = self.sample(self._prompts, indices, group, self._seed, check, seconds)
            drawn += samples
            warning = judge_failures(verdicts_of(drawn))
            following = indices.stop
            groups = [samples[begin : begin + group] for begin in range(0, len(samples), group)]
            is_filtered = self._rollout.filter == "equal"
            kept += [sample for each in groups if not is_filtered or has_unequal_rewards(each) for sample in each]
            if following - first >= MAX_DRAWS * wanted and len(kept) < wanted * group:
                raise EqualRewardsError(
                    f"rollout.filter equal: of {following - first:,} prompts only {len(kept) // group:,} have unequal "
                    f"rewards, and a step needs {wanted:,}; use prompts that are neither too easy nor too hard, a "
                    "larger rollout.group, or filter: none"
                )
        metrics = step_metrics(drawn, group)
        tokens = sum(sample.num_generated for sample in drawn)
        metrics["rollout_tokens_per_second"] = tokens / max(seconds["rollout"], 1e-9)
        return StepSamples(kept, group, following, seconds, metrics, warning)

    def complete(
        self, prompts: PromptSource, indices: Sequence[int], seed: int, version: int, check: Callable[[], None]
    ) -> list[RolloutSample]:
        """Return one verified sample of each of these prompts, from all ranks, from the newest weights."""
        self._engine.refresh(version)
        return self.sample(prompts, indices, 1, seed, check, {})

    def sample(
        self,
        prompts: PromptSource,
        indices: Sequence[int],
        group: int,
        seed: int,
        check: Callable[[], None],
        seconds: dict[str, float],
    ) -> list[RolloutSample]:
        """Return the verified samples of these prompts, from all ranks, with the weights of the last `refresh`."""
        own = [prompts.prompt(index) for index in indices[self._ranks.rank :: self._ranks.world]]

        def check_and_beat() -> None:
            self._clock.page.beat()
            check()

        with self._phase("rollout", seconds):
            samples = self._rollouts.generate(own, group, seed, check_and_beat)
        with self._phase("reward", seconds):
            self._rewards.verify(samples, check_and_beat)
        with self._phase("rollout", seconds):  # waits for the slowest rank
            gathered = gather_objects(samples, self._ranks)
        gathered.sort(key=lambda sample: (sample.prompt.index, sample.copy))
        with self._phase("reward", seconds):
            self._rewards.add_model_rewards(gathered)
        return gathered

    @contextmanager
    def _phase(self, name: str, seconds: dict[str, float]) -> Iterator[None]:
        """Book the time inside as this phase; in an evaluation the ledger's kind stays."""
        began = time.perf_counter()
        if self._clock.current != "evaluate":
            self._clock.switch(name)
        yield
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began


def verdicts_of(samples: Sequence[RolloutSample]) -> list[Verdict]:
    return [sample.verdict for sample in samples if sample.verdict is not None]


def reward_metrics(samples: Sequence[RolloutSample]) -> dict[str, float]:
    """Return the metrics of samples that an evaluation has, too."""
    rewards = np.array([sample.reward for sample in samples])
    lengths = [sample.num_generated for sample in samples]
    metrics = {
        "completion_tokens": float(np.mean(lengths)),
        "truncated_share": float(np.mean([sample.is_truncated for sample in samples])),
    }
    if not np.isnan(rewards).all():
        metrics = {"reward": float(np.nanmean(rewards)), **metrics}
    return metrics


def step_metrics(samples: Sequence[RolloutSample], group: int) -> dict[str, float]:
    """Return the metrics of all samples that a step drew, also of groups that it left out."""
    metrics = reward_metrics(samples)
    metrics["longest_completion_tokens"] = float(max(sample.num_generated for sample in samples))
    ends = np.sort([sample.seconds for sample in samples])
    tail = ends[-1] - ends[max(0, int(np.ceil((1 - TAIL_SHARE) * len(ends))) - 1)]
    metrics["rollout_tail_share"] = float(tail / max(ends[-1], 1e-9))
    metrics["staleness"] = 0.0
    verdicts = verdicts_of(samples)
    if verdicts:
        metrics |= term_metrics(verdicts)
        metrics["verifier_failure_share"] = sum(verdict.reward is None for verdict in verdicts) / len(verdicts)
        rewards = np.array([sample.reward for sample in samples]).reshape(-1, group)
        known = rewards[(~np.isnan(rewards)).sum(axis=1) > 1]
        metrics["reward_std"] = float(np.nanstd(known, axis=1).mean()) if len(known) else 0.0
    return metrics


def term_metrics(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Return the mean value of each term of the reward, and its share of failures; nothing if there is only one."""
    terms = list(dict.fromkeys(name for verdict in verdicts for name in verdict.parts))
    metrics: dict[str, float] = {}
    for term in terms if len(terms) > 1 else ():
        values = [value for verdict in verdicts if (value := verdict.parts.get(term)) is not None]
        finite = [value for value in values if math.isfinite(value)]
        if finite:
            metrics[with_label("term_reward", term)] = float(np.mean(finite))
        metrics[with_label("term_failure_share", term)] = 1 - len(finite) / len(verdicts)
    return metrics
