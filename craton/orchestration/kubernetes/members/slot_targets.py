"""From the members of a drafted run to slots of pods in its JobSet. Reads only the job files of a resumed run.

Members whose pods are alike share a group of slots: as many as may run at a time, so that a sweep of 100 members with
`parallel: 4` holds the nodes of 4. Members with other pods (another image, other GPUs) get a group of their own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from craton.errors import CratonError
from craton.job import Job, parse_job
from craton.orchestration.draft import Draft, draft_nodes
from craton.orchestration.errors import StartError
from craton.orchestration.kubernetes.members.slot_files import MemberSlots, SlotGroup
from craton.orchestration.kubernetes.target import (
    CLUSTER_SECRET,
    METRICS_PORT,
    KubernetesTarget,
    mounts_of,
    secrets_of,
    target_of,
)
from craton.telemetry.files import read_regular_text
from craton.telemetry.members import JOBS_FOLDER, MEMBERS_FOLDER, MemberSpec, MembersSpec

MAX_KUEUE_POD_SETS = 18  # of a Workload, by its schema (Kueue 0.19)
# A run that only reports on its members needs no GPU. Its pod also plans and starts them, which takes memory.
REPORT_RESOURCES = {"cpu": "2", "memory": "8Gi"}


@dataclass(frozen=True)
class SlotTarget:
    """A group of equal slots, with everything that is emitted for it."""

    target: KubernetesTarget  # of one slot
    num_slots: int
    members: tuple[str, ...]  # that may run in them


def check_owner(draft: Draft, run: Path) -> None:
    """Refuse a run whose members cannot be on Kubernetes; `run` is its directory on this machine."""
    job = draft.job
    shared = next((mount.path for mount in mounts_of(job) if mount.name == "shared"), None)
    if draft.members is None:
        return
    if shared is None:
        raise StartError(
            f"{job.where('cluster')}a run with members needs shared storage, because the pods of its members use its "
            "run directory; add `storage: {shared: {path: /fsx, claim: NAME}}` to the cluster file"
        )
    if job.weights_job is not None and not run.is_relative_to(shared):
        raise StartError(
            f"{job.where('model')}model: {{job: FILE}} reads the weights from the run directory, and the pods do not "
            f"see {run}; set CRATON_RUNS to a folder below {shared}"
        )
    if job.kind == "serve":
        raise StartError(f"{job.where('kind')}a server on Kubernetes cannot own members; start it with --on local")


def owner_target(
    draft: Draft, run: Path, target: KubernetesTarget, shell_variables: Collection[str] = ()
) -> KubernetesTarget:
    """Return the target of a run's own pods in a JobSet with slots for its members; unchanged without members. Its pods
    get the secrets of all members: the member manager checks them, and asks servers with their API keys."""
    if draft.members is None:
        return target
    secrets = dict(target.secrets)
    for item in _startable(draft.members.spec):
        for name, secret in secrets_of(_job_of(draft, run, item), shell_variables).items():
            secrets.setdefault(name, secret if secret == CLUSTER_SECRET else target.own_secret)
    target = replace(target, secrets=secrets)
    if draft.members.spec.purpose == "sweep":
        target = replace(
            target, resources=REPORT_RESOURCES, limits={}, shared_memory_bytes=0, instance_types=(), near=None
        )
    check_placement(draft.job, target)
    return replace(target, has_slots=True)


def slots_of(
    draft: Draft, run: Path, owner: KubernetesTarget, shell_variables: Collection[str] = ()
) -> tuple[SlotTarget, ...]:
    """Return the slots for the members of a run; empty for a run without. `owner` is its `owner_target`."""
    if draft.members is None:
        return ()
    startable = _startable(draft.members.spec)
    kinds: list[tuple[KubernetesTarget, list[str]]] = []
    for item in startable:
        try:
            target = _slot_target(draft.job, _job_of(draft, run, item), owner, item.name, shell_variables)
        except CratonError as error:
            raise StartError(f"member {item.name}: {error}") from None
        alike = next((members for known, members in kinds if known == target), None)
        if alike is None:
            kinds.append((target, [item.name]))
        else:
            alike.append(item.name)
    if owner.gang == "kueue" and len(kinds) >= MAX_KUEUE_POD_SETS:
        raise StartError(
            f"the members need {len(kinds)} kinds of pods, and Kueue admits up to {MAX_KUEUE_POD_SETS - 1} beside the "
            "run's own; give members the same image and the same nodes"
        )
    limit = draft.members.spec.parallel or len(startable)
    return tuple(
        SlotTarget(replace(target, slot=f"slot{number}"), min(len(members), limit), tuple(members))
        for number, (target, members) in enumerate(kinds)
    )


def slots_layout(owner: KubernetesTarget, slots: Collection[SlotTarget]) -> MemberSlots:
    """Return what the member manager needs to know of the slots."""
    groups = [SlotGroup(item.target.slot, item.num_slots, item.target.num_pods, item.members) for item in slots]
    return MemberSlots(owner.name, tuple(groups), METRICS_PORT, owner.give_up_seconds)


def check_placement(job: Job, target: KubernetesTarget) -> None:
    """Refuse a placement that the scheduler would apply to all members together instead of each."""
    if target.near is not None and target.gang != "kueue":
        raise StartError(
            f"{job.where('placement')}placement within {target.near.level}: only Kueue can place each member of a run "
            "by itself; remove `placement:`, or use a cluster file with `gang: kueue`"
        )


def _startable(spec: MembersSpec) -> list[MemberSpec]:
    return [item for item in spec.members if not item.is_kept]


def _job_of(draft: Draft, run: Path, item: MemberSpec) -> Job:
    assert draft.members is not None
    if item.name in draft.members.jobs:
        return draft.members.jobs[item.name]
    path = run / JOBS_FOLDER / f"{item.name}.yaml"
    try:
        return parse_job(read_regular_text(path), str(path), item.folder or ".")
    except OSError as error:
        raise StartError(f"{path} cannot be read ({error.strerror}); restore it") from None


def _slot_target(
    owner_job: Job, job: Job, owner: KubernetesTarget, name: str, shell_variables: Collection[str]
) -> KubernetesTarget:
    """Return the target of the slot that a member needs. What all pods of a JobSet have in common is the owner's."""
    run = Path(owner.directory, MEMBERS_FOLDER, name)
    made = target_of(
        draft_nodes(job, run, "kubernetes"),
        run,
        submission=owner.submission,
        shell_variables=shell_variables,
        user=owner.user,
    )
    if made.directory != str(run):
        raise StartError(f"its cluster file does not mount {owner.directory}, the directory of the run that owns it")
    for key in ("gang", "namespace", "queue", "priority"):
        theirs, ours = getattr(made, key), getattr(owner, key)
        if theirs != ours:
            raise StartError(
                f"its {key} is {theirs or 'not set'}, and that of the run is {ours or 'not set'}; all pods of a run "
                "are in one JobSet, so give both the same"
            )
    if job.run.time_limit not in (None, owner_job.run.time_limit):
        raise StartError("run.time_limit of a member is the run's on Kubernetes; set it in the job of the run")
    check_placement(job, made)
    _check_code(job, made)
    return replace(
        made,
        run=owner.run,
        name=owner.name,
        kind=owner.kind,
        directory=owner.directory,
        drafted_at="",
        env={},  # the launch gives the ranks their variables
        secrets={
            key: owner.own_secret if secret == made.own_secret else secret for key, secret in made.secrets.items()
        },
        topology=owner.topology,
        time_limit=None,
        save_before=0,
        restarts=0,
        give_up_seconds=owner.give_up_seconds,
        server_port=0,  # only pods of the run use it
        is_open=False,
    )


def _check_code(job: Job, target: KubernetesTarget) -> None:
    """Refuse a command in a folder that the owner's pod, which copies the code of members, does not see."""
    if job.kind != "command":
        return
    workdir = job.workdir.path if job.workdir and job.workdir.path else job.folder.resolve()
    if not any(Path(workdir).is_relative_to(mount.path) for mount in target.mounts):
        raise StartError(
            f"{job.where('command')}its folder {workdir} is not visible in the pods; keep it below "
            f"{' or '.join(mount.path for mount in target.mounts)}"
        )
