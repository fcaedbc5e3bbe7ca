"""From a job to the members that its run owns: one for each combination of a sweep, one for `model: {job: FILE}`, and
the servers of `rollout: {mode: separate}`.

Nothing here starts or writes anything. Earlier runs are read only to find a result that can be kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from craton.errors import CratonError
from craton.job import Job, load_job, sweep_jobs
from craton.job.sections import Data
from craton.orchestration.draft.members.checked import MAX_MEMBER_NAME, Members
from craton.orchestration.draft.members.rollout_servers import rollout_servers
from craton.orchestration.errors import StartError
from craton.orchestration.saved_steps import newest_checkpoint
from craton.remote import is_url
from craton.telemetry import RunDirectory, list_runs, runs_root
from craton.telemetry.members import MEMBERS_FOLDER, MemberSpec, MembersSpec, Need

MAX_EARLIER_RUNS = 1000  # the newest, in whose members a result is looked for
ONE_AT_A_TIME = 1  # a member takes all of the job's cluster


def member_jobs(job: Job, run: Path | None = None, backend: str = "local") -> Members | None:
    """Return the members of the job's run in the directory `run`, default: its name in the root of runs; None for a job
    without members. A member of a sweep that starts from the weights of another job waits for that job."""
    run = runs_root() / job.name if run is None else run
    weights = _weights_member(job, run)
    owner = job if weights is None else job.with_weights_of(weights.job, weights.run)
    servers = rollout_servers(job, backend) if job.sweep is None else {}
    if job.sweep is None and weights is None and not servers:
        return None
    members = [] if weights is None else [weights.spec]
    jobs = {} if weights is None else {weights.spec.name: weights.job}
    needs: dict[str, Need] = {} if weights is None or weights.spec.is_kept else {weights.spec.name: "done"}
    if job.sweep is None and servers:
        members += [MemberSpec(name, dict(needs), "ready") for name in servers]
        return Members(MembersSpec(members, purpose="rollouts"), {**jobs, **servers}, owner)
    if job.sweep is None:
        return Members(MembersSpec(members, purpose="weights"), jobs, owner)
    for swept in sweep_jobs(owner):
        if swept.name in jobs:
            raise StartError(
                f"{job.where('sweep')}a member of the sweep has the name of the job that trains its weights, "
                f"{swept.name}; rename one of them"
            )
        members.append(MemberSpec(swept.name, dict(needs), values=swept.values))
        jobs[swept.name] = swept.job
    return Members(MembersSpec(members, job.sweep.parallel or ONE_AT_A_TIME, "sweep"), jobs, owner)


def is_result_of(run: RunDirectory, job: Job) -> bool:
    """Return whether a run has the result of this job: it is done, its last checkpoint is there, and its job and data
    are the same, under any name. A job with functions of the user has none: their code may have changed."""
    if not run.looks_like_a_run() or not run.has("DONE") or _uses_own_code(job):
        return False
    try:
        ran = load_job(run.job_path)
        saved = newest_checkpoint(run, ran)
    except (CratonError, OSError):
        return False
    return saved is not None and saved.step == job.steps and _is_same(ran, job)


@dataclass(frozen=True)
class _WeightsMember:
    spec: MemberSpec
    job: Job
    run: Path  # that has the weights, once it is done


def _weights_member(job: Job, run: Path) -> _WeightsMember | None:
    """Return the member that trains the weights of a job; None if it needs none, or if another run has them."""
    trained = job.weights_job
    if trained is None:
        return None
    name = trained.name[:MAX_MEMBER_NAME].rstrip("-._")
    own = run / MEMBERS_FOLDER / name
    if job.trained_run not in (None, own):
        return None
    gate: Need | None = "done" if job.sweep is None else None
    for earlier in _earlier_runs(own, trained.name):
        if is_result_of(RunDirectory(earlier), trained):
            return _WeightsMember(MemberSpec(name, {}, gate, is_kept=True, result=str(earlier)), trained, earlier)
    return _WeightsMember(MemberSpec(name, {}, gate), trained.model_copy(update={"name": name}), own)


def _earlier_runs(own: Path, name: str) -> Iterator[Path]:
    """Yield where the result of a job may be: the member itself, a run of its name, a member of that name elsewhere."""
    yield own
    yield runs_root() / name
    for run in list_runs()[:MAX_EARLIER_RUNS]:
        if (member := run.path / MEMBERS_FOLDER / own.name) != own and member.is_dir():
            yield member


def _uses_own_code(job: Job | None) -> bool:
    """Return whether the user's functions take part, of which another version may have trained an earlier run."""
    if job is None:
        return False
    is_own = any(not function.startswith("craton.") for function in job.functions.values())
    return is_own or (job.model_shape is None and job.weights_job is None) or _uses_own_code(job.weights_job)


def _is_same(ran: Job, job: Job) -> bool:
    """Return whether two jobs train the same weights. Names and injected faults do not change them."""
    others = {"name", "data", "chaos"}
    if ran.model_dump(exclude=others) != job.model_dump(exclude=others) or not _is_same_data(ran.data, job):
        return False
    if ran.weights_job is None or job.weights_job is None:
        return ran.weights_job is job.weights_job
    return _is_same(ran.weights_job, job.weights_job)


def _is_same_data(ran: Data, job: Job) -> bool:
    """Return whether a run read the data of the job: a run names the tokens that were made of the job's text."""
    if ran == job.data:
        return True
    if not job.data.mixture:
        return False
    from craton.ml.data import prepared_folders

    folders = prepared_folders(job)
    if folders is None or ran.tokenizer not in (None, job.data.tokenizer):
        return False

    def prepared(paths: tuple[tuple[str, float], ...]) -> list[tuple[str, float]]:
        return [(path if is_url(path) else str(folders[path]), weight) for path, weight in paths]

    others = {"path", "validation", "tokenizer"}
    return (
        list(ran.mixture) == prepared(job.data.mixture)
        and list(ran.validation_mixture) == prepared(job.data.validation_mixture)
        and ran.model_dump(exclude=others) == job.data.model_dump(exclude=others)
    )
