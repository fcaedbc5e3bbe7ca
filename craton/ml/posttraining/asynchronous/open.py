"""From a job to the samples of modes overlap and separate: what generates, where the journal is, what is recorded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from craton.job import Job
from craton.ml.data import PromptEncoder, PromptSource
from craton.ml.models import Decoder
from craton.ml.posttraining.asynchronous.completing import CompletionSettings
from craton.ml.posttraining.asynchronous.endpoint_backend import EndpointBackend
from craton.ml.posttraining.asynchronous.engine_backend import EngineBackend
from craton.ml.posttraining.asynchronous.groups import digest
from craton.ml.posttraining.asynchronous.journal import RolloutJournal
from craton.ml.posttraining.asynchronous.samples import AsynchronousSamples, RolloutBackend
from craton.ml.posttraining.asynchronous.server_backend import ServersBackend
from craton.ml.posttraining.gathering import TrainedWeights
from craton.ml.posttraining.shared import RolloutEngine
from craton.ml.posttraining.verdicts import Rewards
from craton.ml.serving import EngineSettings
from craton.ml.training import SetupError, TrainingSetup, tier_folders
from craton.ml.verifiers import VerifierPool

MAX_RUNNING = 256  # requests of one rank in a batch
_STEP = re.compile(r"step-(\d+)")


def open_asynchronous(
    setup: TrainingSetup, prompts: PromptSource, encoder: PromptEncoder, pool: VerifierPool | None, rewards: Rewards
) -> AsynchronousSamples:
    """Return the samples of a job with asynchronous rollouts. All ranks call it together."""
    job = setup.job
    assert job.rollout is not None
    assert job.train is not None
    assert job.steps is not None
    settings = CompletionSettings(
        job.rollout.group,
        job.max_completion_tokens,
        job.rollout.temperature,
        job.train.seed,
        job.sequence - job.max_completion_tokens,
        job.rollout.max_turns if job.rollout.environment else 0,
        encoder.stop_tokens,
        setup.vocabulary,
    )

    def note(name: str, reason: str) -> None:
        step = setup.clock.page.step
        setup.recorder.event(name, step=step, reason=reason)
        print(f"step {step}: {reason}", flush=True)

    return AsynchronousSamples(
        _backend(setup, encoder, note),
        settings,
        prompts,
        encoder,
        pool,
        rewards,
        job.rollout,
        job.steps,
        RolloutJournal(setup.directory.journal_folder, rules_of(job)),
        setup.ranks,
        setup.clock,
        note,
        lambda: _oldest_checkpoint(setup),
    )


def rules_of(job: Job) -> str:
    """Return a fingerprint of all that makes a sample of a prompt, except its weights and where a judge is served."""
    assert job.rollout is not None
    terms = [term.model_dump(mode="json", exclude={"endpoint": {"url", "key"}}) for term in job.reward]
    settings = job.rollout.model_dump(mode="json", include={"group", "temperature", "environment", "turns"})
    return digest(json.dumps([terms, settings, job.max_completion_tokens], sort_keys=True))


def _backend(setup: TrainingSetup, encoder: PromptEncoder, note: Callable[[str, str], None]) -> RolloutBackend:
    job, ranks = setup.job, setup.ranks
    assert job.rollout is not None
    under_way = -(-job.rollout.prompts * (job.rollout.max_staleness + 1) // ranks.world) * job.rollout.group
    if job.rollout.endpoint is not None:
        return EndpointBackend(job.rollout.endpoint, job.rollout.temperature, min(MAX_RUNNING, under_way), note)
    if job.rollout.mode == "separate":
        if not isinstance(setup.model, Decoder):
            raise SetupError("rollout servers need a model of Craton's own decoder families; use rollout.endpoint")
        limit = max(1, min(MAX_RUNNING, under_way) // ranks.world)
        weights = TrainedWeights(setup.model, ranks)
        num_ranks = job.rollout.layout.tp or 1 if job.rollout.layout else 1
        return ServersBackend(setup.directory, job.rollout.worker_names, weights, ranks, limit, num_ranks, note)
    max_running = min(MAX_RUNNING, under_way)
    settings = EngineSettings(max_length=job.sequence, max_running=max_running)
    engine = RolloutEngine(setup.model, ranks, settings, encoder.stop_tokens, shares=False)
    return EngineBackend(engine, max_running)


def _oldest_checkpoint(setup: TrainingSetup) -> int:
    """Return the oldest step of a checkpoint that all ranks see; 0 if there is none."""
    steps: list[int] = []
    for tier in tier_folders(setup.job, setup.directory):
        if isinstance(tier.path, Path) and tier.node is None:
            with suppress(OSError):
                names = [path.name for path in tier.path.iterdir()]
                steps += [int(match[1]) for name in names if (match := _STEP.fullmatch(name))]
    return min(steps, default=0)
