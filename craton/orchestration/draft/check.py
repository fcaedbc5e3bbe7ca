"""Step 3 of a start: checks before anything is planned, prepared or paid for."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from craton.extras import require_extra
from craton.http_guard import is_loopback
from craton.job import TRAINING_KINDS, ContentError, Job, JobError, ModelError, check_here, check_trackers
from craton.job.model import (
    check_reward_model,
    int4_format,
    is_reward_model,
    load_config,
    trains_reward_model,
    vocabulary_mismatch,
    weights_folder,
)
from craton.job.sections import STANDARD_LIBRARY, place_of
from craton.job.sections.posttraining import ROLLOUT_KEY_VARIABLE
from craton.job.sections.suites import load_suite
from craton.ml import TRAINED_PRECISIONS
from craton.orchestration.draft.choose_backend import backend_name
from craton.orchestration.errors import StartError
from craton.remote import is_url


def check_job(job: Job, backend: str, run: Path, job_folder: Path, stop_at: int | None) -> None:
    """Refuse a job that cannot run, before planning it."""
    check_precision(job)
    check_optimizer(job)
    check_weights(job)
    check_tiers(job, run)
    check_needs(job, backend, job_folder)
    check_is_closed(job)
    if backend != "kubernetes":  # the cluster may hold secrets that this shell does not have
        check_secrets(job, os.environ)
    if job.rollout is not None and job.rollout.endpoint is not None:
        from craton.orchestration.draft.rollout_endpoint import check_rollout_endpoint  # imports an HTTP client

        check_rollout_endpoint(job, is_here=backend == "local")
    if stop_at is not None:
        check_stop(job, stop_at)


def check_packages(job: Job, backend: str, python: str) -> None:
    """Refuse what the packages of this environment cannot run, where its ranks use this environment."""
    if python != sys.executable or backend not in ("local", "slurm"):
        return
    user = f"{job.where('kind')}a job of kind {job.kind}"
    if job.kind in TRAINING_KINDS:
        require_extra("train", user)
    elif job.serve is not None or job.eval is not None:
        require_extra("serve", user)


def check_precision(job: Job) -> None:
    if job.kind in TRAINING_KINDS and job.precision not in TRAINED_PRECISIONS:
        raise StartError(
            f"{job.where('train', 'precision')}precision {job.precision} can be planned but not trained yet; "
            f"{', '.join(TRAINED_PRECISIONS)} can"
        )


def check_optimizer(job: Job) -> None:
    if job.train is not None and job.train.optimizer != "adamw":
        raise StartError(
            f"{job.where('train', 'optimizer')}optimizer {job.train.optimizer} can be planned but not trained yet; "
            "write optimizer: adamw"
        )


def check_weights(job: Job) -> None:
    """Check that the initial weights are on this machine, before data is prepared."""
    if job.kind in TRAINING_KINDS or job.serve:
        start = job.weights_folder
        if job.serve and _scores(job, start):
            raise StartError(
                f"{job.where('model')}{job.served_name} is a reward model: it scores texts and cannot generate any; a "
                "job of kind grpo reads its export with `reward: [{model: FOLDER}]`"
            )
        if job.serve and start is not None:
            check_stored_format(start, job.where("model"))
    for place, folder in job.reference_folders.items():
        found = weights_folder(folder)
        if found is None:
            raise StartError(
                f"{job.where(*place)}{'.'.join(place)}: {folder} has no weights; give a folder with a config.json and "
                "*.safetensors"
            )
        if is_reward_model(load_config(found)[0]):
            raise StartError(
                f"{job.where(*place)}{'.'.join(place)}: {folder} is a reward model, which has no probabilities of "
                "tokens; give a language model"
            )
        if place == ("serve", "speculate", "model"):
            check_stored_format(found, f"{job.where(*place)}{'.'.join(place)}: ")
    check_draft_model(job)
    check_served_reward_models(job)


def check_stored_format(folder: Path, where: str) -> None:
    """Refuse weights that are quantized in a format that Craton does not serve."""
    config, file = load_config(folder)
    try:
        int4_format(config, str(file))
    except ModelError as error:
        raise StartError(f"{where}{error}") from None


def check_served_reward_models(job: Job) -> None:
    """Refuse folders that cannot score the answers of a server."""
    for place, folder in job.reward_model_folders.items() if job.serve else ():
        try:
            check_reward_model(Path(folder), job.weights_folder)
        except ModelError as error:
            raise StartError(f"{job.where(*place)}{'.'.join(place)}: {error}") from None


def check_draft_model(job: Job) -> None:
    """Refuse a draft model whose tokens are not those of the model, as far as both tokenizers are here."""
    draft = job.serve.draft_model if job.serve else None
    if draft is None or job.serve is None or job.serve.initialize == "random":
        return
    model, drafting = job.weights_folder, weights_folder(draft)
    if model is not None and drafting is not None and (mismatch := vocabulary_mismatch(model, drafting)):
        raise StartError(f"{job.where('serve', 'speculate', 'model')}serve.speculate: {mismatch}")


def _scores(job: Job, weights: Path | None) -> bool:
    """Return whether what a job serves has scores instead of tokens: a folder, a run, or the result of another job."""
    assert job.serve is not None
    if job.weights_job is not None:
        return job.weights_job.preference is not None and job.weights_job.preference.loss == "reward"
    if weights is not None:
        return is_reward_model(load_config(weights)[0])
    run = job.trained_run if job.serve.initialize != "random" else None
    return run is not None and trains_reward_model(run)


def check_tiers(job: Job, run: Path) -> None:
    """Refuse early the checkpoint tiers that the ranks would refuse after they have started."""
    storage = job.cluster.file.storage if job.cluster.file else None
    for number, tier in enumerate(job.checkpoint.tiers if job.kind in TRAINING_KINDS else ()):
        try:
            place_of(tier, storage, run)
        except JobError as error:
            raise StartError(f"{job.where('checkpoint', 'tiers', number)}{error}") from None


def check_needs(job: Job, backend: str | None = None, job_folder: Path | None = None) -> None:
    """Refuse missing dependencies where the job runs here: by request, or because its cluster is local. Slurm nodes
    share this Python unless the job has an image."""
    chosen = backend_name(job, backend)
    if chosen == "local" and (job.cluster.is_local or backend is not None):
        check_here(job, job_folder)
        check_data(job)
        check_problems(job)
    elif chosen == "slurm" and not job.run.image:
        check_trackers(job)


def check_data(job: Job) -> None:
    """Refuse data without text, by reading its beginning; token shards and URLs are opened during preparation."""
    if job.kind not in TRAINING_KINDS or not job.data.mixture:
        return
    from craton.ml import data

    problems = []
    for key, mixture in (("path", job.data.mixture), ("validation", job.data.validation_mixture)):
        for path, _ in mixture:
            if path == STANDARD_LIBRARY or is_url(path) or data.is_shard_folder(Path(path)):
                continue
            try:
                data.check_text(Path(path), has_rows=job.kind != "pretrain")
            except data.DataError as error:
                problems.append(f"{job.where('data', key)}data.{key}: {error}")
    if problems:
        raise ContentError(problems)


def check_problems(job: Job) -> None:
    """Refuse a suite whose rows lack what its template and verifiers read."""
    for location, use in job.suites.items():
        from craton.ml.evaluation import EvaluationError, open_problems

        try:
            open_problems(load_suite(use.suite), use.problems)
        except EvaluationError as error:
            raise StartError(f"{job.where(*location)}{'.'.join(location)}: {error}") from None


def check_is_closed(job: Job) -> None:
    """Refuse a server that other machines could use without an API key."""
    serve = job.serve
    if serve is not None and serve.api_keys is None and not is_loopback(serve.host):
        raise StartError(
            f"{job.where('serve', 'host')}serve.host {serve.host} is reachable from other machines, so clients need "
            "an API key: run `export SERVE_KEYS=$(openssl rand -hex 24)` and set `api_keys: SERVE_KEYS` (--api-keys "
            "SERVE_KEYS), or listen on 127.0.0.1"
        )


def check_secrets(job: Job, environment: Mapping[str, str]) -> None:
    missing = [name for name in job.run.secrets if name not in environment]
    if missing:
        raise StartError(
            f"{job.where('run', 'secrets')}run.secrets names {', '.join(missing)}, which is not set in this shell; "
            f"run `export {missing[0]}=...` and start again"
        )
    for key, several in (("api_keys", " (several with commas)"), ("admin_key", "")):
        name = getattr(job.serve, key, None)
        if name is not None and not environment.get(name, "").strip():
            raise StartError(
                f"{job.where('serve', key)}serve.{key} names {name}, which is unset or empty in this shell; "
                f"run `export {name}=KEY`{several} and start again"
            )


def check_rollout_key(job: Job, backend: str, environment: Mapping[str, str]) -> None:
    """Refuse rollout servers on nodes of their own without an API key, which Slurm takes from this shell."""
    has_servers = backend == "slurm" and job.rollout is not None and bool(job.rollout.worker_names)
    if has_servers and not environment.get(ROLLOUT_KEY_VARIABLE, "").strip():
        raise StartError(
            f"{job.where('rollout', 'mode')}rollout.mode separate starts servers that other machines can reach, so "
            f"they need an API key: run `export {ROLLOUT_KEY_VARIABLE}=$(openssl rand -hex 24)` and start again"
        )


def check_stop(job: Job, stop_at: int) -> None:
    if job.kind not in TRAINING_KINDS:
        raise StartError(f"--stop-at is for training jobs; kind {job.kind} has no steps")
    last = (job.steps or stop_at + 1) - 1
    if not 1 <= stop_at <= last:
        raise StartError(
            f"--stop-at {stop_at} is out of range: the job has {job.steps:,} steps; give a step from 1 to {last:,}"
        )
