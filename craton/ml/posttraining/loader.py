"""The loader of rollouts: it makes the micro-batches of a step's optimizer updates from the step's samples.

Every rank has all samples and computes the same advantages, minibatches and rows; it trains on its share. The state is
the first prompt of the next step: a loader opened there continues exactly, with any number of ranks. A sample is
trained if its prompt lies before the state, so none is trained twice, and none is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from craton.job import Job
from craton.ml.data import key_of, permute
from craton.ml.posttraining.advantages import completion_advantages, generalized_advantages, whiten
from craton.ml.posttraining.rows import Arrays, RowPlan, TrainedSequence, micro_batches, num_slots
from craton.ml.posttraining.samples import RolloutSample, StepSamples
from craton.ml.posttraining.token_reader import TokenReader
from craton.ml.training.parallel import Ranks

Values = Callable[[Sequence[TrainedSequence]], list[NDArray[np.float32]]]


class SampleDrawer(Protocol):
    """Where the samples of a step come from; see `SynchronousSamples`."""

    pending: Sequence[int]  # prompts before the next one of the last draw that later steps train

    def draw(self, first: int, check: Callable[[], None]) -> StepSamples: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Scorers:
    """What reads the samples before they are trained on; None if the loss does not need it."""

    old: TokenReader | None = None  # log-probabilities of the policy, before the step's updates
    values: TokenReader | None = None  # of the value head, before the step's updates
    reference: Values | None = None  # log-probabilities of the reference
    teacher: Values | None = None


class RolloutLoader:
    """`next` gives the micro-batches of one update after another; the first of a step draws its samples."""

    def __init__(
        self,
        job: Job,
        ranks: Ranks,
        samples: SampleDrawer,
        scorers: Scorers,
        start: int = 0,
        observe: Callable[[StepSamples], None] = lambda _: None,
    ) -> None:
        """`observe` sees the samples of every step."""
        assert job.policy is not None
        assert job.rollout is not None
        assert job.train is not None
        self._policy, self._rollout, self._seed = job.policy, job.rollout, job.train.seed
        self._sequence, self._packs = job.sequence, job.data.pack
        self._ranks, self._samples, self._scorers = ranks, samples, scorers
        self._observe = observe
        self._next_prompt = start
        self._updates: Iterator[list[Arrays]] = iter(())
        self._left = 0  # updates of the step in progress
        self._ended_at = 0.0  # when the last step's batches were all given, by the host's clock
        self.check: Callable[[], None] = lambda: None
        self.phase_seconds: Mapping[str, float] = {}
        self.metrics: Mapping[str, float] = {}

    @property
    def state(self) -> int:
        return self._next_prompt

    @property
    def pending(self) -> Sequence[int]:
        return self._samples.pending

    @pending.setter
    def pending(self, indices: Sequence[int]) -> None:
        self._samples.pending = indices

    @property
    def is_step_done(self) -> bool:
        return not self._left

    def next(self) -> Sequence[Arrays]:
        self.phase_seconds = {}
        if not self._left:
            self._begin_step()
        self._left -= 1
        batches = next(self._updates)
        if not self._left:
            self._ended_at = time.perf_counter()
        return batches

    def close(self) -> None:
        self._updates, self._left = iter(()), 0
        self._samples.close()

    def _begin_step(self) -> None:
        trained = time.perf_counter() - self._ended_at if self._ended_at else 0.0
        step = self._samples.draw(self._next_prompt, self.check)
        self._observe(step)
        scoring = time.perf_counter()
        sequences = self._sequences(step)
        self.phase_seconds = {**step.phase_seconds, "compute": time.perf_counter() - scoring}
        metrics = dict(step.metrics)
        metrics["step_tokens"] = float(sum(len(sequence.tokens) for sequence in sequences))
        if "advantage" in self._names:
            kept = np.array([bool(np.any(sequence.values["advantage"])) for sequence in sequences])
            metrics["advantage_zero_share"] = float(1 - kept.sum() / max(1, len(step.samples)))
        if trained:
            waited = sum(step.phase_seconds.values())
            metrics["trainer_idle_share"] = waited / (waited + trained)
            if "rollout_tokens_per_second" in metrics:
                metrics.setdefault("rollout_idle_share", 1 - step.phase_seconds["rollout"] / (waited + trained))
        self.metrics = metrics
        self._updates = self._minibatches(sequences, self._next_prompt)
        self._left = self._policy.updates
        self._next_prompt = step.next_prompt

    @property
    def _names(self) -> list[str]:
        """The values of each token that the objective reads."""
        scorers = self._scorers
        read = {
            "old_logprob": scorers.old,
            "old_value": scorers.values,
            "return_": scorers.values,
            "reference_logprob": scorers.reference,
            "teacher_logprob": scorers.teacher,
        }
        names = ["rollout_logprob", *(name for name, reader in read.items() if reader is not None)]
        return names if self._policy.loss == "distill" else ["advantage", *names]

    def _sequences(self, step: StepSamples) -> list[TrainedSequence]:
        """Return what is trained: samples with a verdict, and with all values that the loss needs."""
        has_rewards = self._policy.loss != "distill"
        kept: list[TrainedSequence] = []
        samples: list[RolloutSample] = []
        advantages: list[float] = []
        by_sample = self._advantages(step)
        for sample, advantage in zip(step.samples, by_sample, strict=True):
            is_masked = self._rollout.truncated == "mask" and sample.is_truncated
            if is_masked or not sample.num_generated or (has_rewards and np.isnan(sample.reward)):
                continue
            kept.append(sample.sequence(is_trained=True))
            samples.append(sample)
            advantages.append(advantage)
        for sequence, advantage in zip(kept, advantages, strict=True):
            sequence.values["advantage"] = (sequence.weight * advantage).astype(np.float32)
        readers: dict[str, Values | None] = {
            "old_logprob": self._read_with(self._scorers.old),
            "old_value": self._read_with(self._scorers.values),
            "reference_logprob": self._scorers.reference,
            "teacher_logprob": self._scorers.teacher,
        }
        for name, read in readers.items():
            for sequence, values in zip(kept, read(kept) if read is not None else (), strict=read is not None):
                sequence.values[name] = np.where(sequence.weight != 0, values, 0.0).astype(np.float32)
        if self._scorers.values is not None:
            self._estimate_advantages(samples, kept)
        return kept

    def _read_with(self, reader: TokenReader | None) -> Values | None:
        return None if reader is None else lambda sequences: reader.read(sequences, self._packs)

    def _advantages(self, step: StepSamples) -> list[float]:
        """Return the advantage of each sample; ppo and distill have theirs per token."""
        if self._policy.loss in ("ppo", "distill"):
            return [0.0] * len(step.samples)
        found: list[float] = completion_advantages(step.rewards, self._policy.loss).reshape(-1).tolist()
        return found

    def _estimate_advantages(self, samples: Sequence[RolloutSample], sequences: Sequence[TrainedSequence]) -> None:
        """ppo: advantages and returns per generated token. The reward comes at the last one."""
        for sample, sequence in zip(samples, sequences, strict=True):
            places = np.flatnonzero(sequence.weight)
            rewards = np.zeros(len(places))
            rewards[-1] = sample.reward
            values = sequence.values["old_value"][places].astype(np.float64)
            advantages, returns = generalized_advantages(rewards, values, self._policy.discount, self._policy.gae)
            sequence.values["advantage"] = _spread(advantages, places, sequence)
            sequence.values["return_"] = _spread(returns, places, sequence)
        if not sequences:
            return
        weight = np.concatenate([sequence.weight for sequence in sequences]).astype(np.float64)
        whole = np.concatenate([sequence.values["advantage"] for sequence in sequences]).astype(np.float64)
        ends = np.cumsum([sequence.places for sequence in sequences])[:-1]
        for sequence, values in zip(sequences, np.split(whiten(whole, weight), ends), strict=True):
            sequence.values["advantage"] = values.astype(np.float32)

    def _minibatches(self, sequences: list[TrainedSequence], first: int) -> Iterator[list[Arrays]]:
        """Yield the micro-batches of every update. With several updates, each epoch has its own random order."""
        policy, layout = self._policy, self._ranks.layout
        orders = [
            permute(np.arange(len(sequences)), len(sequences), key_of(self._seed, first, epoch))
            if policy.updates > 1 and sequences
            else np.arange(len(sequences))
            for epoch in range(policy.epochs)
        ]
        parts = chain.from_iterable(np.array_split(order, policy.minibatches) for order in orders)
        slots, names = num_slots(self._rollout.samples, self._sequence), self._names
        for part in parts:
            members = [sequences[index] for index in part.tolist()]
            lengths = [member.places for member in members]
            plan = RowPlan.of(lengths, self._sequence, layout, self._packs)
            yield micro_batches(plan, members, names, self._ranks.data_rank, layout, self._sequence, slots)


def _spread(values: NDArray[np.float64], places: NDArray[np.int64], sequence: TrainedSequence) -> NDArray[np.float32]:
    """Return the values at their places, zeros elsewhere."""
    whole = np.zeros(sequence.places, np.float32)
    whole[places] = values
    return whole
