"""Runs begin, stop and go on: what the verbs `run`, `stop` and `resume` do to a run directory.

Nothing is lost by a mistake here: a name that is taken is refused, a run that lives is never started a second time, and
a resume changes only the files that say how the next generation runs.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from craton.agent import next_number
from craton.agent.coordination import AVOID_FILE, check_secret, forget_avoided
from craton.agent.processes import free_port
from craton.infrastructure import StorageError
from craton.infrastructure.storage import CachedFolder, open_store
from craton.job import TRAINING_KINDS, Job, JobError, dump_job, load_job, parse_job
from craton.job.sections import RESCUE, TierPlace, place_of, rescue_place
from craton.orchestration.backend import BACKEND_FILE, read_submission, write_submission
from craton.orchestration.backends import backend_of, backend_of_run
from craton.orchestration.changes import faults_left, remove_run, resized_nodes
from craton.orchestration.chaos_orders import disarm
from craton.orchestration.draft import (
    COPY,
    JOB_FOLDER,
    Draft,
    Progress,
    check_code,
    draft_run,
    find_code,
    keep_code,
    with_chosen_layout,
    with_fitting_layout,
)
from craton.orchestration.errors import RunStateError, StartError
from craton.orchestration.local import kill_agents, living_agents
from craton.orchestration.run_files import USER_STOP, write_whole
from craton.orchestration.server import check_port
from craton.orchestration.start.relaunch import last_launch
from craton.orchestration.watching import GOES_ON, check_not_running, check_running, launching, standing_of
from craton.telemetry import MARKERS, RunDirectory, RunExistsError, read_json, summarize
from craton.telemetry.files import first_link, names_in, paths_in, read_regular, storage_problem, tail_lines

START_PRODUCTIVE_SECONDS = 1.0  # of a command that failed at once: it is productive from its first moment
_STEP = re.compile(r"step-([0-9]{8,15})")
EVENT_BYTES = 256 << 10  # of the end of a node's events, in which a last save is told
CHECK_SECONDS = 20.0  # how long a service is waited for that a run would write to


@dataclass(frozen=True)
class SavedStep:
    """The newest whole checkpoint of a run."""

    step: int
    tier: str
    path: Path | str  # a folder or an s3:// prefix


@dataclass(frozen=True)
class Rescue:
    """A state that the run directory has because no lasting tier took it."""

    step: int
    path: Path
    reason: str  # what kept it from the tiers


def check_name_is_free(root: Path, name: str) -> None:
    """Refuse early, before anything is planned or tokenized, a name that is taken or a root that cannot be written."""
    if (root / name).exists() and not failed_at_start(RunDirectory(root / name)):
        raise RunExistsError(_taken(root, name))
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        raise StartError(
            f"runs cannot be kept in {root} ({error.strerror}); set CRATON_RUNS to a folder you may write to"
        ) from None


def start_run(draft: Draft, root: Path) -> RunDirectory:
    """Create the run directory, write what it holds, and start the agents, or hand it to a scheduler."""
    if draft.on == "local":
        check_server(draft.job)
    code = find_code(draft.job, root)
    before = RunDirectory(root / draft.job.name)
    if before.path.exists() and failed_at_start(before):
        remove_run(before)
    try:
        run = RunDirectory.create(root, draft.job.name)
    except RunExistsError:
        raise RunExistsError(_taken(root, draft.job.name)) from None
    with launching(run):
        try:
            if code is not None:
                keep_code(code, run)
            _launch(run, draft)
        except BaseException:  # Ctrl-C too
            if _is_only_here(run, draft):
                shutil.rmtree(run.path)  # nothing has run: the name is free again
            raise
    return run


def failed_at_start(run: RunDirectory) -> bool:
    """Whether a run of this machine failed before it did anything: no step, no checkpoint, no productive second. Its
    name is free, for whoever mends the job file starts the job again under the same name."""
    if run.path.is_symlink() or not run.has("FATAL") or read_submission(run).on != "local":
        return False
    try:
        summary = summarize(run)
    except (OSError, ValueError, TypeError, AttributeError):
        return False
    did_something = summary.step > 0 or summary.ledger.get("productive", 0.0) > START_PRODUCTIVE_SECONDS
    has_saved = any(names_in(run.path / "checkpoints" / tier) for tier in names_in(run.path / "checkpoints", "[a-z]*"))
    return summary.state == "failed" and not did_something and not has_saved and not living_agents(run)


def prepare_data(draft: Draft, progress: Progress | None = None) -> tuple[Draft, dict[str, int]]:
    """Tokenize raw text once, before any rank waits for it; what is prepared already costs nothing. Returns the draft
    with the prepared folders in place of the text, so that the run and its resumes read the same tokens even when the
    text changes, and the tokens to train on behind each path as it was written."""
    job = draft.job
    if job.kind not in TRAINING_KINDS or not job.data.mixture:
        return draft, {}
    from craton.ml import data

    folders = data.prepare(job, progress=progress)
    tokens = {path: data.Shards(folders[path]).tokens for path, _ in job.data.mixture}
    return replace(draft, job=_with_prepared_data(job, folders)), tokens


def _with_prepared_data(job: Job, folders: Mapping[str, Path]) -> Job:
    document = yaml.safe_load(dump_job(job))
    section = document["data"]
    for key in ("path", "validation"):
        written = section.get(key)
        if isinstance(written, str):
            section[key] = _place(written, folders[written])
        for part in written if isinstance(written, list) else ():
            part["path"] = _place(part["path"], folders[part["path"]])
    if str(section.get("tokenizer", "")).startswith("bpe:"):
        del section["tokenizer"]  # it was trained, and lies beside the tokens
    return parse_job(yaml.safe_dump(document, sort_keys=False), f"{job.name}/job.yaml")


def _place(written: str, folder: Path) -> str:
    """A URL of shards stays one: every machine has its own mirror of it."""
    return written if CachedFolder.of(folder) else str(folder)


def stop_run(run: RunDirectory) -> None:
    """Ask the ranks to checkpoint, or to finish the requests under way, and leave; returns at once. A run that still
    waits for its nodes is taken back."""
    standing = check_running(run, may_wait=True)
    _mark_stop(run, USER_STOP)
    if not run.has("STOP"):
        raise RunStateError(
            f"{run.name} cannot be told to stop: {storage_problem(run.path) or f'{run.path} cannot be written'}; then "
            f"stop it again, or end it without saving: `craton stop {run.name} --now`"
        )
    backend = backend_of_run(run)
    if standing.condition == "waiting":
        backend.kill(run)
    else:
        backend.stop(run)


def kill_run(run: RunDirectory) -> None:
    """End every process of the run at once, without a checkpoint."""
    check_running(run, may_wait=True)
    _mark_stop(run, f"{USER_STOP} --now")  # first: an agent that comes up now ends by itself
    backend_of_run(run).kill(run)


def _mark_stop(run: RunDirectory, text: str) -> None:
    """On a full disk the marker is set without its text, which is enough to stop; on a read-only one it is not set."""
    with suppress(OSError):
        run.mark("STOP", text)


def release_run(run: RunDirectory) -> bool:
    """Lets go of a run that its scheduler holds, as after a node that could not start it. False: it is not held."""
    if read_submission(run).on != "slurm":
        return False
    from craton.orchestration.slurm import release_held

    return release_held(run)


def resumed_job(run: RunDirectory, cluster: str | None = None, steps: int | None = None) -> Job:
    """The job of a run as its next generation has it, on as many nodes as were asked for last. On another cluster the
    layout is chosen anew."""
    check_not_running(run)
    try:
        job = load_job(run.job_path)
    except JobError as error:
        problems = "; ".join(str(error).splitlines())
        raise RunStateError(
            f"{problems}; if the file is torn or missing, copy the job file that {run.name} was started from to "
            f"{run.job_path}"
        ) from None
    nodes = resized_nodes(run)
    if cluster is None and nodes is not None and nodes != job.cluster.num_nodes:
        smallest = job.cluster.min_nodes if job.cluster.min_nodes < nodes else 0
        resized = job.cluster.model_copy(update={"num_nodes": nodes, "min_nodes": smallest})
        each = int(read_json(run.launch_path).get("ranks_per_node") or 1)
        job = with_fitting_layout(job.model_copy(update={"cluster": resized}), nodes * each)
    if cluster is None and steps is None:
        return job
    document = yaml.safe_load(dump_job(job if cluster is None else with_chosen_layout(job)))
    if cluster is not None:
        document["cluster"] = cluster
    if steps is not None:
        if job.train is None:
            raise RunStateError(f"{run.name} is of kind {job.kind}, which has no steps; leave out --steps")
        document["train"].pop("tokens", None)
        document["train"]["steps"] = steps
    return parse_job(yaml.safe_dump(document, sort_keys=False), f"{run.name}/job.yaml", run.path)


def draft_resume(
    run: RunDirectory,
    job: Job,
    *,
    on: str | None = None,
    stop_at: int | None = None,
    progress: Progress | None = None,
) -> Draft:
    """The next generation of a run, planned again; where it ran before unless said otherwise."""
    saved = newest_checkpoint(run, job)
    if saved and job.steps is not None and saved.step >= job.steps:
        raise RunStateError(
            f"{run.name} is at step {saved.step:,} of {job.steps:,} already; `--steps {2 * saved.step}` trains on, "
            f"`craton export {run.name} FOLDER` saves the model"
        )
    if saved and stop_at is not None and stop_at <= saved.step:
        raise RunStateError(
            f"--stop-at {stop_at} is not ahead of {run.name}, whose newest checkpoint is of step {saved.step:,}; give "
            "a later step, or leave it out"
        )
    if run.has("DONE") and job.kind == "command":
        raise RunStateError(f"{run.name} is done; `craton run` with another --name starts its command again")
    check_code(run)
    check_secret(run)
    last, rebuilt = last_launch(run, job)
    draft = draft_run(
        job.model_copy(update={"chaos": ()}),
        run.path,
        on=on or read_submission(run).on,
        generation=max(next_number(run), last.generation + 1),
        stop_at=stop_at,
        job_folder=last.env.get(JOB_FOLDER, "."),
        port=free_port(),
        progress=progress,
    )
    left = faults_left(run, job, last, draft.launch, saved.step if saved else 0)
    copy = {COPY: last.env[COPY]} if COPY in last.env else {}
    launch = replace(draft.launch, chaos=left, env={**draft.launch.env, **copy})
    return replace(draft, job=job, launch=launch, note="; ".join(filter(None, [rebuilt, draft.note])))


def resume_run(run: RunDirectory, draft: Draft) -> None:
    """Start the next generation; it restores the newest checkpoint by itself. What is refused leaves the run as it
    was."""
    with launching(run):
        check_not_running(run)
        if draft.on == "local":
            check_server(draft.job)
        _launch(run, draft)


def newest_checkpoint(run: RunDirectory, job: Job | None = None) -> SavedStep | None:
    """The newest step with a COMPLETE marker in any tier that can be seen from this machine; the fastest that has it.
    What is asked of S3 may fail when there is another answer."""
    job = job or load_job(run.job_path)
    storage = job.cluster.file.storage if job.cluster.file else None
    saved_steps: list[SavedStep] = []
    failed: StorageError | None = None
    places = {tier.to: place_of(tier, storage, run.path) for tier in job.checkpoint.places}
    for name, located in {**places, RESCUE: rescue_place(run.path)}.items():
        try:
            saved_steps += _saved_objects(name, located) if located.is_url else _saved_folders(name, located, run.path)
        except StorageError as error:
            failed = error
    if failed is not None and not saved_steps:
        raise failed
    return max(saved_steps, key=lambda saved: saved.step, default=None)


def find_rescue(run: RunDirectory) -> Rescue | None:
    """The state in the run directory that no tier has; None where there is none, as it goes when a tier has it."""
    saved = max(_saved_folders(RESCUE, rescue_place(run.path), run.path), key=lambda saved: saved.step, default=None)
    if saved is None:
        return None
    reasons: dict[str, str] = {}  # by tier, its last words
    for path in paths_in(run.path / "events", "*.jsonl"):
        for event in tail_lines(path, EVENT_BYTES):
            if event.get("event") == "checkpoint_failed" and event.get("step") == saved.step:
                reasons[str(event.get("tier"))] = str(event.get("reason") or "")
    prefix = f"step {saved.step} was not saved: "
    messages = [text.removeprefix(prefix) for tier, text in reasons.items() if tier != RESCUE and text]
    return Rescue(saved.step, Path(saved.path), "; ".join(messages) or "no tier took it")


def check_places(job: Job, run: Path, on: str = "local") -> None:
    """Refuse before data is prepared what no rank could write to. What only the nodes of a cluster have cannot be tried
    from here."""
    storage = job.cluster.file.storage if job.cluster.file else None
    for number, tier in enumerate(job.checkpoint.tiers if job.kind in TRAINING_KINDS else ()):
        located = place_of(tier, storage, run)
        if located.is_inside_run or (located.is_node_local and on != "local"):
            continue
        try:
            if located.is_url:
                open_store(located.place).check_writable(CHECK_SECONDS)
            else:
                Path(located.place).mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=located.place):
                    pass
        except OSError as error:
            raise StartError(
                f"{job.where('checkpoint', 'tiers', number)}checkpoint tier {tier.to} cannot be written: "
                f"{located.place}: {error.strerror}; give it a folder that you may write to"
            ) from None
        except StorageError as error:
            raise StartError(f"{job.where('checkpoint', 'tiers', number)}checkpoint tier {tier.to}: {error}") from None


def check_server(job: Job) -> None:
    """Refuse before a model is loaded what its server would fail on then; nothing for other jobs."""
    if job.serve is None:
        return
    check_port(job)
    trained = job.trained_run
    if trained is not None and job.serve.initialize != "random" and newest_checkpoint(RunDirectory(trained)) is None:
        raise StartError(
            f"{job.where('model')}the run {trained.name} has no checkpoint yet, so that there is nothing to serve; "
            f"`craton stop {trained.name}` saves one"
        )


def _saved_folders(name: str, located: TierPlace, run: Path) -> list[SavedStep]:
    if located.is_inside_run and first_link(located.place, run) is not None:
        return []
    pattern = "*/step-*/COMPLETE" if located.is_node_local else "step-*/COMPLETE"
    base = Path(located.place)
    return [
        SavedStep(int(step[1]), name, marker.parent)
        for marker in sorted(base.glob(pattern))
        if (step := _STEP.fullmatch(marker.parent.name)) and marker.is_file() and first_link(marker, base) is None
    ]


def _saved_objects(name: str, located: TierPlace) -> list[SavedStep]:
    store = open_store(located.place)
    folders = [item for item in store.folders() if _STEP.fullmatch(item)]
    for folder in sorted(folders, key=lambda entry: -int(entry.removeprefix("step-"))):
        if store.exists(f"{folder}/COMPLETE"):
            return [SavedStep(int(folder.removeprefix("step-")), name, store.where(folder))]
    return []


def _launch(run: RunDirectory, draft: Draft) -> None:
    backend = backend_of(draft.on)
    ready = replace(draft, launch=replace(draft.launch, master_port=free_port()))
    texts = {**ready.files(), **backend.files(ready, run)}
    orders = [f"{run.chaos_folder.name}/{path.name}" for path in paths_in(run.chaos_folder, "*.json")]
    with _put_back(run, [*MARKERS, run.resize_path.name, AVOID_FILE, *orders, *texts]):
        disarm(run)
        for marker in MARKERS:
            run.unmark(marker)
        run.resize_path.unlink(missing_ok=True)
        forget_avoided(run)
        for name, text in texts.items():
            write_whole(run.path / name, text)
        submission = backend.submit(ready, run)
    if submission != read_submission(run):
        write_submission(run, submission)


def _is_only_here(run: RunDirectory, draft: Draft) -> bool:
    """Whether no scheduler can have a run whose start was broken off; agents of this machine are ended."""
    if draft.on == "local":
        kill_agents(run)
    return draft.on == "local" or not (run.path / BACKEND_FILE).exists()


@contextmanager
def _put_back(run: RunDirectory, names: Iterable[str]) -> Iterator[None]:
    """These files as they are now, if what follows fails while nobody has been handed the run: why it stopped or failed
    is still to be read, and the next resume begins where this one did."""
    handed_to = read_submission(run)
    before = {name: _text_of(run.path / name) for name in names}
    try:
        yield
    except BaseException:  # Ctrl-C too
        if read_submission(run) == handed_to:  # else a scheduler may have it
            for name, text in before.items():
                if text is None:
                    (run.path / name).unlink(missing_ok=True)
                else:
                    write_whole(run.path / name, text)
        raise


def _text_of(path: Path) -> str | None:
    try:
        return read_regular(path).decode(errors="surrogateescape")
    except FileNotFoundError:
        return None


def _taken(root: Path, name: str) -> str:
    number = 2
    while (root / f"{name}-{number}").exists():
        number += 1
    run = RunDirectory(root / name)
    is_running = standing_of(run).condition in GOES_ON
    there = "is running" if is_running else "exists already"
    verb = f"`craton logs {name} -f` follows it" if is_running else f"`craton resume {name}` goes on with it"
    return f"the run {name} {there} ({run.path}); {verb}, `--name {name}-{number}` starts another"
