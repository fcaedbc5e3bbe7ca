"""From a job to the samples of modes overlap and separate: what generates, where the journal is, what is recorded."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from craton.ml.data import PromptEncoder, PromptSource
from craton.ml.posttraining.asynchronous.completing import CompletionSettings
from craton.ml.posttraining.asynchronous.engine_backend import EngineBackend
from craton.ml.posttraining.asynchronous.journal import JOURNAL_FOLDER, Journal
from craton.ml.posttraining.asynchronous.samples import AsynchronousSamples, RolloutBackend
from craton.ml.posttraining.shared import RolloutEngine
from craton.ml.posttraining.verdicts import Rewards
from craton.ml.serving.settings import EngineSettings
from craton.ml.training import TrainingSetup, tier_folders
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
    )

    def note(name: str, reason: str) -> None:
        step = setup.clock.page.step
        setup.recorder.event(name, step=step, reason=reason)
        print(f"step {step}: {reason}", flush=True)

    return AsynchronousSamples(
        _backend(setup, encoder),
        settings,
        prompts,
        encoder,
        pool,
        rewards,
        job.rollout,
        job.steps,
        Journal(setup.directory.path / JOURNAL_FOLDER),
        setup.ranks,
        setup.clock,
        note,
        lambda: _oldest_checkpoint(setup),
    )


def _backend(setup: TrainingSetup, encoder: PromptEncoder) -> RolloutBackend:
    job, ranks = setup.job, setup.ranks
    assert job.rollout is not None
    under_way = -(-job.rollout.prompts * (job.rollout.max_staleness + 1) // ranks.world) * job.rollout.group
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
