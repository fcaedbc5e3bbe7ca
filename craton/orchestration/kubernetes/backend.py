"""The backend `kubernetes`: submit the emitted objects, and query their state. It decides nothing.

It sends the run's `kubernetes.yaml`, plus the values of secrets, which go from the caller's environment to the cluster
and are written nowhere, and the topology of the cluster's nodes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import yaml

from craton.orchestration.backend import (
    SLOTS_FILE,
    Standing,
    Submission,
    is_elsewhere,
    read_submission,
    write_submission,
)
from craton.orchestration.draft import Draft
from craton.orchestration.errors import RunStateError, SchedulerError
from craton.orchestration.kubernetes.api import Connection, ask, load_kr8s
from craton.orchestration.kubernetes.codepack import pack_code
from craton.orchestration.kubernetes.emitters import manifests, to_yaml
from craton.orchestration.kubernetes.handover import (
    HandoverRecord,
    completed,
    hand_over,
    is_fresh,
    is_own,
    is_own_pod,
    is_pending,
)
from craton.orchestration.kubernetes.logs import read_logs
from craton.orchestration.kubernetes.members import (
    check_owner,
    hand_member,
    kill_member,
    member_standing,
    owner_target,
    owner_with_slots,
    slots_layout,
    slots_of,
    slots_text,
)
from craton.orchestration.kubernetes.objects import OURS, seen_of
from craton.orchestration.kubernetes.pods import INSTANCE, Manifest
from craton.orchestration.kubernetes.standing import GONE, is_running, leaving_of, living, standing_of
from craton.orchestration.kubernetes.target import KubernetesTarget, target_of
from craton.telemetry import RunDirectory, RunError
from craton.telemetry.files import read_regular_text

MANIFEST_FILE = "kubernetes.yaml"
KILL_SECONDS = 1  # with 0 Kubernetes would forget the pods while they still run


class KubernetesBackend:
    """The cluster of the caller's kubectl context."""

    name = "kubernetes"

    def check(self, draft: Draft, run: RunDirectory) -> None:
        if owner_with_slots(run) is None:
            load_kr8s()
            slots_of(draft, run.path, self.target(draft, run.path))

    def files(self, draft: Draft, run: RunDirectory) -> Mapping[str, str]:
        if owner_with_slots(run) is not None:  # its pods are in the JobSet of its owner
            return {}
        target = self.target(draft, run.path)
        slots = slots_of(draft, run.path, target, os.environ.keys())
        if not slots:
            return {MANIFEST_FILE: to_yaml(manifests(target))}
        layout = slots_text(slots_layout(target, slots))
        if target.files:
            target = replace(target, files={**target.files, SLOTS_FILE: layout})
        return {MANIFEST_FILE: to_yaml(manifests(target, slots)), SLOTS_FILE: layout}

    def command(self, draft: Draft, run: RunDirectory) -> list[list[str]]:
        return [["kubectl", "create", "--validate=strict", "-f", str(run.path / MANIFEST_FILE)]]

    def submit(self, draft: Draft, run: RunDirectory) -> Submission:
        if owner_with_slots(run) is not None:
            return hand_member(draft, run)
        documents, record = read_manifests(run), HandoverRecord(run)
        try:
            return ask(lambda connection: hand_over(connection, record, draft.job, documents, os.environ))
        except BaseException:  # Ctrl-C too, and a second one during the cleanup
            record.put_back()
            raise

    def look(self, runs: Iterable[RunDirectory]) -> dict[str, Standing]:
        everything = list(runs)
        members = {run.name: member_standing(run) for run in everything if owner_with_slots(run) is not None}
        listed = [run for run in everything if run.name not in members]
        if not listed:
            return members
        submissions = {run.name: read_submission(run) for run in listed}
        try:
            standings = ask(lambda connection: _look(connection, submissions))
        except SchedulerError as error:  # `ps` still shows the run directories, and this error
            unknown = {name: Standing("unknown", item.job, sentence=str(error)) for name, item in submissions.items()}
            return members | unknown
        return members | {run.name: _settled(run, submissions[run.name], standings[run.name]) for run in listed}

    def kill(self, run: RunDirectory) -> None:
        """Delete the pods without their grace period, and so without a checkpoint; those of a member stay, for the
        next."""
        if owner_with_slots(run) is not None:
            kill_member(run)
        else:
            self._end(run, KILL_SECONDS)

    def stop(self, run: RunDirectory) -> None:
        """Delete the run's owner where its pods do not see the STOP marker; they get SIGTERM and their grace period to
        save. Always for a server: its owner would restart pods that exit by themselves. A resume submits the run
        again."""
        if owner_with_slots(run) is not None:
            return
        if is_elsewhere(run) or read_submission(run).job.startswith("LeaderWorkerSet/"):
            self._end(run, None)

    def logs(self, run: RunDirectory, *, follow: bool = False, tail: int | None = None) -> Iterator[tuple[str, str]]:
        """Yield (pod, line) of all pods, from the cluster; a line of a rank begins with `[rank N]`. With `follow`, also
        of pods created later, until the run has ended."""
        submission = read_submission(run)
        owner, selector = _owner(submission), _selector(submission)
        lines: SimpleQueue[tuple[str, str] | None] = SimpleQueue()
        outcome: Future[None] = Future()

        def read() -> None:
            try:
                ask(lambda connection: read_logs(connection, owner, selector, follow, tail, lines))
                outcome.set_result(None)
            except RunError as error:
                outcome.set_exception(error)
            finally:
                lines.put(None)

        threading.Thread(target=read, name="logs", daemon=True).start()
        while (line := lines.get()) is not None:
            yield line
        outcome.result(timeout=0)

    def target(self, draft: Draft, run: Path) -> KubernetesTarget:
        check_owner(draft, run)
        target = target_of(
            draft,
            run,
            submission=secrets.token_hex(8),
            shell_variables=os.environ.keys(),
            user=(os.getuid(), os.getgid()),
            code=pack_code(run),
        )
        return owner_target(draft, run, target, os.environ.keys())

    def _end(self, run: RunDirectory, grace_seconds: int | None) -> None:
        submission = read_submission(run)
        owner, selector = _owner(submission), _selector(submission)
        namespace = owner["metadata"]["namespace"]

        async def end(connection: Connection) -> bool:
            pods = living(await connection.list("v1", "Pod", namespace, labelSelector=selector))
            is_deleted = await connection.delete(owner)
            if grace_seconds is not None and any(is_running(pod) for pod in pods):  # pending pods go with their owner
                await connection.delete_pods(namespace, selector, grace_seconds)
            return is_deleted or bool(pods)

        if not ask(end):
            raise RunStateError(f"{run.name} is no longer on the cluster; `craton resume {run.name}` resumes it")


def end_pods_on(run: RunDirectory, host: str) -> None:
    """Delete the run's pods on one cluster node, with their grace period to save; their owner recreates them."""
    submission = read_submission(run)
    namespace = submission.details["namespace"]

    async def end(connection: Connection) -> int:
        pods = await connection.list("v1", "Pod", namespace, labelSelector=_selector(submission))
        there = [pod for pod in pods if host and (pod.get("spec") or {}).get("nodeName") == host]
        for pod in there:
            await connection.delete({**pod, "metadata": {"namespace": namespace, **pod["metadata"]}})
        return len(there)

    if not ask(end):
        raise RunStateError(f"{run.name} has no pod on {host or 'a known node'}: there is nothing to move")


def read_manifests(run: RunDirectory) -> list[Manifest]:
    path = run.path / MANIFEST_FILE
    try:
        documents = list(yaml.safe_load_all(read_regular_text(path)))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise RunStateError(f"{path} cannot be read ({error}); `craton resume {run.name}` rewrites it") from None
    return documents


async def _look(connection: Connection, runs: Mapping[str, Submission]) -> dict[str, Standing]:
    """Query the state of runs, with one request per kind and namespace."""
    here = {
        name: submission for name, submission in runs.items() if submission.details.get("server") == connection.server
    }
    standings = {
        name: Standing(
            "unknown",
            submission.job,
            sentence=f"it is on {submission.details.get('server')}, which is not your current context",
        )
        for name, submission in runs.items()
        if name not in here
    }
    for namespace in sorted({element.details["namespace"] for element in here.values()}):
        inside = {name: entry for name, entry in here.items() if entry.details["namespace"] == namespace}
        kinds = {item.details["version"]: item.job for item in inside.values()}
        owners, pods = await seen_of(connection, namespace, kinds)
        for name, submission in inside.items():
            objects = owners.get(submission.job)
            if objects is not None and is_own(objects.owner, submission):
                standings[name] = standing_of(objects)
            else:
                standings[name] = leaving_of(submission.job, [pod for pod in pods if is_own_pod(pod, submission)])
    return standings


def _settled(run: RunDirectory, submission: Submission, standing: Standing) -> Standing:
    """Resolve the state of a run whose submission got no response, now that the cluster has answered."""
    if not is_pending(submission) or standing.condition == "unknown":
        return standing
    if standing.reason != GONE or standing.is_leaving:
        with contextlib.suppress(OSError):  # another user's run, which is read-only
            write_submission(run, completed(submission))
        return standing
    if is_fresh(run):
        return Standing("unknown", sentence="it was just submitted, and Kubernetes does not list it yet")
    return Standing("ended", reason="Kubernetes never received it")


def _owner(submission: Submission) -> Manifest:
    kind, _, name = submission.job.partition("/")
    if not name or "namespace" not in submission.details:
        raise RunStateError("the run was not submitted to Kubernetes; its backend.json names no object")
    metadata = {"name": name, "namespace": submission.details["namespace"]}
    return {"apiVersion": submission.details["version"], "kind": kind, "metadata": metadata}


def _selector(submission: Submission) -> str:
    return f"{OURS},{INSTANCE}={submission.job.partition('/')[2]}"
