"""Read a job file, and check it before anything costs money.

`load_job` returns a `Job`, or raises one JobError that lists every problem with its line. Every combination of a sweep
is checked too, and so is the job of `model: {job: FILE}`, with the jobs that it starts from in turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from craton.job.document import Document, parse_document, parse_section, read_document
from craton.job.errors import ContentError, FileError, SchemaError
from craton.job.jobfile import TRAINING_KINDS, Job
from craton.job.sweep import check_sweep, with_missing_values
from craton.nearest import nearest_name
from craton.schema import schema_problem

MAX_WEIGHTS_JOBS = 4  # in one chain: `RUN/members/...` is not read deeper


def load_job(path: Path | str) -> Job:
    """Read and check a job file."""
    return _job(read_document(path), (Path(path).resolve(),))


def parse_job(text: str, name: str = "job.yaml", folder: Path | str = ".") -> Job:
    """Parse and check a job from a string; relative paths in it start at `folder`."""
    return _job(parse_document(text, name, folder))


def make_job(data: Mapping[str, object], folder: Path | str = ".") -> Job:
    """Make a job from a mapping; errors name the key, without a line."""
    document = Document(name="", folder=Path(folder), data=dict(data), lines={})
    try:
        return _job(document, has_file=False)
    except ContentError as error:
        raise type(error)([problem.removeprefix(":1: ") for problem in error.problems]) from None


def _job(document: Document, chain: tuple[Path, ...] = (), has_file: bool = True) -> Job:
    """Return the job of a document; `chain`: the files whose jobs start from its weights, and its own."""
    plain = _without_schema(document)
    weights = _weights_job(plain, chain)
    if weights is not None:
        plain = replace(plain, data={**plain.data, "model": _model_of(weights)})
    job = parse_section(Job, with_missing_values(plain, Job)).with_stored_precision()
    if has_file:
        job = _with_software(job.with_document(document))
    if weights is not None:
        _check_start(job, plain, weights)
        job = job.with_weights_of(weights, _weights_run(document))
    return check_sweep(job, plain)


def _with_software(job: Job) -> Job:
    software = job.folder / Path(job.software).expanduser()
    if "/" not in job.software and software.suffix not in (".toml", ".json"):
        return job
    if not software.is_file():
        raise ContentError([f"{job.where('software')}software: profile file {job.software!r} does not exist"])
    return job.model_copy(update={"software": str(software.resolve())})


def _without_schema(document: Document) -> Document:
    """Remove the schema key; SchemaError for an unsupported schema, before any error about its other keys."""
    if problem := schema_problem(document.data.get("schema")):
        where = f"{document.name}:{document.line(('schema',))}: " if document.name else ""
        raise SchemaError([where + problem])
    return replace(document, data={key: value for key, value in document.data.items() if key != "schema"})


def _weights_job(document: Document, chain: tuple[Path, ...]) -> Job | None:
    """Return the job of `model: {job: FILE}`; None for any other model. A resolved file has the whole job there."""
    model = document.data.get("model")
    if not isinstance(model, dict) or not _names_a_job(model):
        return None
    written = model.get("job")
    allowed = ("job", "run") if isinstance(written, dict) else ("job",)
    for key in model:
        if key not in allowed:
            known = "" if "job" not in model else " beside job: the shape of the model is that of the job"
            near = "" if known else "; did you mean 'job'?"
            raise _problem(document, (key,), f"key {key!r} is not known under model{known}; allowed: job{near}")
    if isinstance(written, dict):
        inner = {location[2:]: line for location, line in document.lines.items() if location[:2] == ("model", "job")}
        weights = _job(Document(document.name, document.folder, written, inner), chain)
    elif isinstance(written, str) and written.strip():
        weights = _read_weights_job(document, Path(written.strip()).expanduser(), chain)
    else:
        raise _problem(document, ("job",), f"model.job: {written!r} is not a job file; write e.g. job: base.yaml")
    if problem := _weights_problem(weights):
        raise _problem(document, ("job",), f"model.job: {weights.name} {problem}")
    return weights


def _names_a_job(model: Mapping[str, object]) -> bool:
    return "job" in model or (len(model) == 1 and nearest_name(next(iter(model)), ("job",)) is not None)


def _read_weights_job(document: Document, written: Path, chain: tuple[Path, ...]) -> Job:
    path = (document.folder / written).resolve()
    if path in chain:
        names = " → ".join(file.name for file in (*chain[chain.index(path) :], path))
        raise _problem(document, ("job",), f"model.job: a member that owns itself: {names}; start from another job")
    if len(chain) > MAX_WEIGHTS_JOBS:
        names = " → ".join(file.name for file in (*chain, path))
        raise _problem(
            document, ("job",), f"model.job: {names}: at most {MAX_WEIGHTS_JOBS} jobs may start from each other"
        )
    beside = Path(document.name).parent / written
    try:
        inner = read_document(beside if beside.resolve() == path else path)
    except FileError as error:
        raise _problem(document, ("job",), f"model.job: {error}") from None
    return _job(inner, (*(chain or (document.folder / document.name,)), path))


def _weights_problem(weights: Job) -> str:
    """Return why a job has no weights to start from."""
    if weights.kind not in TRAINING_KINDS:
        return f"is of kind {weights.kind}, which trains no weights; give a job of kind {' or '.join(TRAINING_KINDS)}"
    assert weights.train is not None
    if weights.sweep is not None:
        return "is a sweep, which has many results; give a job without `sweep:`"
    if weights.run.copies > 1:
        return "has run.copies, and so many results; give a job without copies"
    if weights.train.lora is not None:
        return "trains LoRA adapters, not a whole model; run it, `craton export` merges them into a folder"
    return "" if weights.steps is not None else "never ends: it has neither train.steps nor train.tokens; set one"


def _check_start(job: Job, document: Document, weights: Job) -> None:
    section = job.train or job.serve
    if section is not None and section.initialize == "random":
        key = "train" if job.train else "serve"
        line = document.line((key, "initialize"))
        raise ContentError(
            [
                f"{document.name}:{line}: {key}.initialize random ignores the weights of {weights.name}; remove it, or "
                "write the model without `job:`"
            ]
        )


def _model_of(weights: Job) -> Any:
    return weights.model if isinstance(weights.model, str) or weights.model is None else weights.model.model_dump()


def _weights_run(document: Document) -> Path | None:
    """Return the run that trains the weights, as a resolved file states it."""
    model = document.data["model"]
    run = model.get("run") if isinstance(model, dict) else None
    if run is not None and not (isinstance(run, str) and run.startswith("/")):
        raise _problem(document, ("run",), f"model.run: {run!r} is not the directory of a run")
    return None if run is None else Path(run)


def _problem(document: Document, key: tuple[str, ...], text: str) -> ContentError:
    return ContentError([f"{document.name}:{document.line(('model', *key))}: {text}"])
