"""Prepare a run's data: tokenize it once, before any rank waits for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import yaml

from craton.infrastructure.storage import CachedFolder
from craton.job import TRAINING_KINDS, TUNING_KINDS, Job, dump_job, parse_job
from craton.orchestration.draft import JOB_FOLDER, Draft, Progress
from craton.orchestration.errors import StartError


def prepare_data(draft: Draft, progress: Progress | None = None) -> tuple[Draft, dict[str, int]]:
    """Tokenize raw text once, before any rank waits for it; already prepared data costs nothing. Return the draft with
    the prepared folders instead of the text, so that the run and its resumes read the same tokens even if the text
    changes, and the number of training tokens of each path."""
    job = draft.job
    reports = draft.members is not None and draft.members.spec.purpose == "sweep"  # each member prepares its own
    if job.kind not in TRAINING_KINDS or reports:
        return draft, {}
    from craton.ml import data

    if not data.has_data(job):
        if job.kind in TUNING_KINDS:
            raise StartError(
                f"{job.where('data')}data: kind {job.kind} needs path or source; give a file of rows, or source: "
                "module:function"
            )
        return draft, {}
    folders = data.prepare(job, progress=progress)
    if job.kind == "grpo" and draft.on == "local":  # elsewhere the nodes have other secrets and isolation
        from craton.orchestration.start.rollout_rewards import check_rollout_job  # imports an HTTP client

        # where functions are: a resumed job is read from the run directory
        check_rollout_job(job, Path(draft.launch.env.get(JOB_FOLDER, job.folder)))
    tokens = {path: data.Shards(folders[path]).tokens for path, _ in job.data.mixture}
    return replace(draft, job=_with_prepared_data(job, folders, data.tokenizer_folder(job, folders))), tokens


def _with_prepared_data(job: Job, folders: Mapping[str, Path], tokenizer: Path | None) -> Job:
    document = yaml.safe_load(dump_job(job))
    section = document["data"]
    for key in ("path", "validation"):
        written = section.get(key)
        if isinstance(written, str):
            section[key] = _place(written, folders[written])
        for part in written if isinstance(written, list) else ():
            part["path"] = _place(part["path"], folders[part["path"]])
    if str(section.get("tokenizer", "")).startswith("bpe:"):
        del section["tokenizer"]  # the trained tokenizer is beside the tokens
        if not job.data.mixture:
            section["tokenizer"] = str(tokenizer)
    return parse_job(yaml.safe_dump(document, sort_keys=False), f"{job.name}/job.yaml")


def _place(written: str, folder: Path) -> str:
    """Return the prepared path; a URL of shards stays, because every machine has its own mirror."""
    return written if CachedFolder.of(folder) else str(folder)
