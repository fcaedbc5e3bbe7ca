"""The recipe of kind grpo: policies that learn from their own rollouts.

All ranks build it together: the engine over the trained weights, the verifiers' pool, the models that score samples,
and the loader. `train.evaluate` gives the mean reward of one completion for each of the first `sequences` prompts of
data.validation, sampled at the job's temperature with seeds that are the same in every evaluation.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from craton.job import Job
from craton.ml.data import DataError, PromptEncoder, PromptSource, key_of, open_prompts, tokenizer_folder
from craton.ml.posttraining.asynchronous import AsynchronousSamples, open_asynchronous
from craton.ml.posttraining.frozen import frozen_model
from craton.ml.posttraining.loader import RolloutLoader, Scorers, Values
from craton.ml.posttraining.objectives import policy_objective
from craton.ml.posttraining.reward_model import RewardModel
from craton.ml.posttraining.rollouts import Rollouts
from craton.ml.posttraining.rows import TrainedSequence
from craton.ml.posttraining.samples import StepSamples
from craton.ml.posttraining.shared import RolloutEngine
from craton.ml.posttraining.synchronous import SynchronousSamples, reward_metrics
from craton.ml.posttraining.token_reader import TokenReader, TokenValues
from craton.ml.posttraining.verdicts import Rewards, RewardScores, gather_objects, open_pool
from craton.ml.serving import EngineSettings
from craton.ml.serving.clients import TeacherEndpoint
from craton.ml.training import (
    Objective,
    Recipe,
    SetupError,
    TrainingInputs,
    TrainingSetup,
    without_adapters,
)
from craton.ml.training.parallel import Pipeline
from craton.ml.verifiers import VerifierPool
from craton.telemetry.rank import SampleRecorder

MAX_RUNNING = 256  # requests of one rank in a batch
VALIDATION = 1  # mixed into the seed of evaluations


def grpo_objective(job: Job) -> Objective:
    assert job.policy is not None
    assert job.rollout is not None
    return policy_objective(job.policy, job.rollout, job.max_completion_tokens)


def open_rollouts(setup: TrainingSetup) -> TrainingInputs:
    """Open everything that makes batches of rollouts."""
    assert setup.job.train is not None
    inputs = _RolloutInputs(setup)
    return TrainingInputs(inputs.open_loader, inputs.evaluate if setup.job.validates else None)


GRPO = Recipe(grpo_objective, open_rollouts)


class _RolloutInputs:
    """What lives as long as a generation of the run."""

    def __init__(self, setup: TrainingSetup) -> None:
        job, ranks = setup.job, setup.ranks
        assert job.train is not None
        assert job.policy is not None
        assert job.rollout is not None
        self._setup = setup
        self._seed = job.train.seed
        folder = tokenizer_folder(job)
        if folder is None:
            raise DataError("the rollouts need a tokenizer; set data.tokenizer to the model's")
        encoder = PromptEncoder(folder)
        prompts = open_prompts(job, vocab=setup.vocabulary)
        self._validation = open_prompts(job, "validation", vocab=setup.vocabulary) if job.validates else None
        has_pool = bool(job.reward) or job.rollout.environment is not None
        assert job.verify is not None
        job_folder = Path(os.environ.get("CRATON_JOB_FOLDER") or ".").absolute()
        pool = open_pool(job.reward, job.verify, job_folder, job.rollout.environment) if has_pool else None
        rewards = Rewards(pool, ranks, _reward_models(setup))
        if job.rollout.mode == "sync":
            self._samples: SynchronousSamples | AsynchronousSamples = _synchronous(
                setup, prompts, encoder, pool, rewards
            )
        else:
            self._samples = open_asynchronous(setup, prompts, encoder, pool, rewards)
        self._loader: RolloutLoader | None = None
        self._scorers = _scorers(setup, self._check)
        local_ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        self._recorder = None
        if ranks.rank % local_ranks == 0:
            self._recorder = SampleRecorder(setup.directory, setup.recorder.node, setup.recorder.generation)

    def open_loader(self, start: int) -> RolloutLoader:
        setup = self._setup
        self._loader = RolloutLoader(setup.job, setup.ranks, self._samples, self._scorers, start, self._observe)
        return self._loader

    def evaluate(self, _pipeline: Pipeline | None) -> dict[str, float]:
        """Return the reward of validation prompts, and the length of their completions."""
        assert self._validation is not None
        assert self._setup.job.train is not None
        wanted = self._setup.job.train.evaluate
        assert wanted is not None
        seed, indices = key_of(self._seed, VALIDATION), range(wanted.sequences)
        version = self._setup.clock.page.step
        return reward_metrics(self._samples.complete(self._validation, indices, seed, version, self._check))

    def _check(self) -> None:
        """Raise if the generation is over."""
        if self._loader is not None:
            self._loader.check()

    def _observe(self, step: StepSamples) -> None:
        """Record a few samples of this rank, and a warning about verifiers."""
        number, ranks, recorder = self._setup.clock.page.step, self._setup.ranks, self._recorder
        if step.warning and ranks.rank == 0:
            self._setup.recorder.event("verifier_failures", step=number, reason=step.warning)
            print(f"step {number}: {step.warning}", flush=True)
        if recorder is not None and ranks.rank == 0:
            recorder.record_trained(number, Counter(sample.prompt.index for sample in step.samples))
        for sample in sorted(step.samples, key=lambda sample: sample.copy):  # of different prompts first
            if recorder is None or recorder.is_full(number):
                return
            if sample.prompt.index % ranks.world != ranks.rank:
                continue
            verdict = sample.verdict
            recorder.record(
                number,
                sample.prompt.content,
                sample.completion,
                verdict.reward if verdict else None,
                verdict.parts if verdict else None,
                verdict.error if verdict else "",
                sample.num_generated,
                sample.versions,
            )


def _synchronous(
    setup: TrainingSetup, prompts: PromptSource, encoder: PromptEncoder, pool: VerifierPool | None, rewards: Rewards
) -> SynchronousSamples:
    job, ranks = setup.job, setup.ranks
    assert job.rollout is not None
    assert job.train is not None
    own_samples = -(-job.rollout.prompts // ranks.world) * job.rollout.group
    settings = EngineSettings(max_length=job.sequence, max_running=min(MAX_RUNNING, own_samples))
    engine = RolloutEngine(setup.model, ranks, settings, encoder.stop_tokens)
    rollouts = Rollouts(
        engine,
        encoder,
        job.rollout.temperature,
        job.max_completion_tokens,
        job.sequence - job.max_completion_tokens,
        pool,
        job.rollout.max_turns if job.rollout.environment else 0,
    )
    return SynchronousSamples(engine, prompts, rollouts, rewards, job.rollout, job.train.seed, ranks, setup.clock)


def _scorers(setup: TrainingSetup, check: Callable[[], None]) -> Scorers:
    """Return the readers that the job's loss needs."""
    job = setup.job
    assert job.policy is not None
    assert job.rollout is not None
    policy, temperature = job.policy, job.rollout.temperature

    def reader(model: nn.Module, what: TokenValues = "log_probs") -> TokenReader:
        return TokenReader(model, setup.ranks, job.sequence, what, temperature)

    return Scorers(
        old=reader(setup.model) if policy.updates > 1 else None,
        values=reader(setup.model, "scores") if policy.loss == "ppo" else None,
        reference=_reference(setup, reader) if policy.kl else None,
        teacher=_teacher(setup, reader, check) if policy.loss == "distill" else None,
    )


def _reference(setup: TrainingSetup, reader: Callable[[nn.Module], TokenReader]) -> Values:
    """Return the log-probabilities of the weights that training starts from, or of a folder's. With adapters the
    former are those of the model without them; otherwise a second, frozen model has them."""
    policy, train = setup.job.policy, setup.job.train
    assert policy is not None
    assert train is not None
    if policy.reference == "start" and train.lora:
        with_adapters = reader(setup.model)

        def read(sequences: Sequence[TrainedSequence]) -> list[NDArray[np.float32]]:
            with without_adapters(setup.model):
                return with_adapters.read(sequences)

        return read
    if policy.reference == "start" and setup.missing_weights:
        raise SetupError(f"policy.kl compares with the weights that training starts from: {setup.missing_weights}")
    return reader(frozen_model(setup, None if policy.reference == "start" else policy.reference)).read


def _teacher(setup: TrainingSetup, reader: Callable[[nn.Module], TokenReader], check: Callable[[], None]) -> Values:
    """Return the log-probabilities of the teacher: a folder's model in the job's layout, or an endpoint, which each
    rank asks about its share of the samples."""
    policy, ranks = setup.job.policy, setup.ranks
    assert policy is not None
    if isinstance(policy.teacher, str):
        return reader(frozen_model(setup, policy.teacher)).read
    assert policy.teacher is not None
    endpoint = TeacherEndpoint(policy.teacher)

    def read(sequences: Sequence[TrainedSequence]) -> list[NDArray[np.float32]]:
        own = range(ranks.rank, len(sequences), ranks.world)
        values = endpoint.read([sequences[index].tokens.tolist() for index in own], check)
        found = dict(gather_objects(list(zip(own, values, strict=True)), ranks))
        return [found[index] for index in range(len(sequences))]

    return read


def _reward_models(setup: TrainingSetup) -> list[RewardScores]:
    """Return the job's reward models, whole on every rank."""
    dtype = torch.float32 if setup.ranks.layout.precision == "fp32" else torch.bfloat16
    terms = [term for term in setup.job.reward if term.model is not None]
    return [(term.name, term.weight, RewardModel(str(term.model), setup.ranks.device, dtype).score) for term in terms]
