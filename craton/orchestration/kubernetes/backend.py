"""The backend `kubernetes`: sends what the emitters wrote, and asks how it does. Nothing is decided here.

What is sent is what stands in the run's `kubernetes.yaml`, but for the values of secrets, which go from the caller's
environment to the cluster and are written nowhere. The object that owns the pods is made first, so that whatever is
refused leaves nothing behind, and everything else goes when it does.
"""

from __future__ import annotations

import asyncio
import base64
import os
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue

import yaml

from craton.orchestration.backend import Standing, Submission, read_submission
from craton.orchestration.draft import Draft
from craton.orchestration.errors import RunStateError, SchedulerError
from craton.orchestration.kubernetes.api import ApiError, Connection, ask, load_kr8s
from craton.orchestration.kubernetes.codepack import pack_code
from craton.orchestration.kubernetes.emitters import manifests, to_yaml
from craton.orchestration.kubernetes.pods import DIRECTORY_ANNOTATION, INSTANCE, MANAGED_BY, Manifest
from craton.orchestration.kubernetes.standing import ended_as, standing_of
from craton.orchestration.kubernetes.target import Target, target_of
from craton.orchestration.kubernetes.waiting import Seen
from craton.telemetry import RunDirectory, RunError, runs_root

MANIFEST_FILE = "kubernetes.yaml"
OURS = f"{MANAGED_BY}=craton"
KINDS = {
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "VolcanoJob": "batch.volcano.sh/v1alpha1",
    "Job": "batch/v1",
    "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1",
}
LEAVE_SECONDS = 180.0  # for the pods of an object that is being removed
LOOK_SECONDS = 0.2
MOST_NAMES = 50  # in one selector, which is a part of an address
KILL_SECONDS = 1  # 0 would only make Kubernetes forget the pods, while they go on


class KubernetesBackend:
    """A cluster that the caller's kubectl would speak to."""

    name = "kubernetes"

    def check(self, draft: Draft) -> None:
        load_kr8s()
        self.target(draft, runs_root() / draft.job.name)

    def files(self, draft: Draft, run: RunDirectory) -> Mapping[str, str]:
        return {MANIFEST_FILE: to_yaml(manifests(self.target(draft, run.path)))}

    def command(self, draft: Draft, run: RunDirectory) -> list[list[str]]:
        return [["kubectl", "create", "--validate=strict", "-f", str(run.path / MANIFEST_FILE)]]

    def submit(self, draft: Draft, run: RunDirectory) -> Submission:
        documents = read_manifests(run)
        return ask(lambda connection: _submit(connection, run, documents, os.environ))

    def look(self, runs: Iterable[RunDirectory]) -> dict[str, Standing]:
        found = {run.name: read_submission(run) for run in runs}
        try:
            return ask(lambda connection: _look(connection, found))
        except SchedulerError as error:  # `ps` shows what the run directories say, and why there is no more
            return {name: Standing("unknown", each.job, sentence=str(error)) for name, each in found.items()}

    def kill(self, run: RunDirectory) -> None:
        """Without the pods' grace, and so without a checkpoint."""
        self._end(run, KILL_SECONDS)

    def stop(self, run: RunDirectory) -> None:
        """Where the pods see another directory, and so not its marker, they are told by a signal, and have their time
        to checkpoint. A resume hands the run in again."""
        if read_submission(run).details.get("directory") != str(run.path):
            self._end(run, None)

    def logs(self, run: RunDirectory, *, follow: bool = False, tail: int | None = None) -> Iterator[tuple[str, str]]:
        """(pod, line) of all pods, from the cluster; a line of a rank begins with `[rank N]`."""
        submission = read_submission(run)
        lines: SimpleQueue[tuple[str, str] | None] = SimpleQueue()
        outcome: Future[None] = Future()

        def read() -> None:
            try:
                ask(lambda connection: _read_logs(connection, submission, follow, tail, lines))
                outcome.set_result(None)
            except RunError as error:
                outcome.set_exception(error)
            finally:
                lines.put(None)

        threading.Thread(target=read, name="logs", daemon=True).start()
        while (line := lines.get()) is not None:
            yield line
        outcome.result(timeout=0)

    def target(self, draft: Draft, run: Path) -> Target:
        return target_of(
            draft,
            run,
            submission=secrets.token_hex(8),
            given=os.environ.keys(),
            user=(os.getuid(), os.getgid()),
            code=pack_code(run),
        )

    def _end(self, run: RunDirectory, grace_seconds: int | None) -> None:
        submission = read_submission(run)

        async def end(connection: Connection) -> bool:
            found = await connection.delete(_owner(submission))
            if grace_seconds is not None:
                await connection.delete_pods(submission.details["namespace"], _selector(submission), grace_seconds)
            return found

        if not ask(end):
            raise RunStateError(
                f"{run.name} is not on the cluster any more; `craton resume {run.name}` goes on with it"
            )


def read_manifests(run: RunDirectory) -> list[Manifest]:
    path = run.path / MANIFEST_FILE
    try:
        documents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError) as error:
        raise RunStateError(f"{path} cannot be read ({error}); `craton resume {run.name}` writes it anew") from None
    return documents


async def _submit(
    connection: Connection, run: RunDirectory, documents: list[Manifest], environment: Mapping[str, str]
) -> Submission:
    owner, *around = documents
    made = await _create_owner(connection, run, owner)
    reference = {
        "apiVersion": made["apiVersion"],
        "kind": made["kind"],
        "name": made["metadata"]["name"],
        "uid": made["metadata"]["uid"],
    }
    missing = ""
    try:
        for document in around:
            document["metadata"]["ownerReferences"] = [reference]
            if document["kind"] == "Secret":
                document = _with_values(document, owner, environment)
            try:
                await connection.create(document)
            except ApiError as error:
                if document["kind"] != "NetworkPolicy" or error.status != 403:
                    raise
                missing = f"its pods can be reached by others in the cluster: {error}"
    except BaseException:
        await connection.delete(owner)
        raise
    details = {
        "namespace": made["metadata"]["namespace"],
        "server": connection.server,
        "version": made["apiVersion"],
        "directory": owner["metadata"]["annotations"][DIRECTORY_ANNOTATION],
        **({"warning": missing} if missing else {}),
    }
    return Submission("kubernetes", f"{made['kind']}/{made['metadata']['name']}", details)


async def _create_owner(connection: Connection, run: RunDirectory, owner: Manifest) -> Manifest:
    """In place of one of the same name that has ended."""
    try:
        return await connection.create(owner)
    except ApiError as error:
        if error.status != 409:
            raise
    there = await connection.read(owner)
    if there is not None:
        if ended_as(there) is None and not there["metadata"].get("deletionTimestamp"):
            raise RunStateError(
                f"{owner['kind']} {owner['metadata']['name']} is on the cluster already and has not ended; `craton "
                f"stop {run.name}` ends it, `--name` starts another"
            )
        await connection.delete(owner)
        await _wait_until_gone(connection, owner)
    return await connection.create(owner)


async def _wait_until_gone(connection: Connection, owner: Manifest) -> None:
    """With its pods: those of the next submission would meet them in the run directory."""
    namespace = owner["metadata"].get("namespace") or connection.namespace
    selector = f"{INSTANCE}={owner['metadata']['labels'][INSTANCE]}"
    deadline = time.monotonic() + LEAVE_SECONDS
    while await connection.read(owner) or await connection.list("v1", "Pod", namespace, labelSelector=selector):
        if time.monotonic() > deadline:
            raise RunStateError(
                f"the pods of {owner['metadata']['name']} have not left within {LEAVE_SECONDS:.0f} s; try again later, "
                f"`kubectl get pods -l {selector}` shows them"
            )
        await asyncio.sleep(LOOK_SECONDS)


def _with_values(secret: Manifest, owner: Manifest, environment: Mapping[str, str]) -> Manifest:
    """The values of what the pods refer to in this Secret."""
    name = secret["metadata"]["name"]
    wanted = [each for each in _secret_keys(owner, name) if each in environment]
    return {**secret, "data": {each: base64.b64encode(environment[each].encode()).decode() for each in wanted}}


def _secret_keys(thing: object, name: str) -> list[str]:
    """The keys of a Secret that anything in a manifest refers to."""
    if isinstance(thing, list):
        return [key for each in thing for key in _secret_keys(each, name)]
    if not isinstance(thing, dict):
        return []
    reference = thing.get("secretKeyRef")
    own = [reference["key"]] if isinstance(reference, dict) and reference.get("name") == name else []
    return own + [key for each in thing.values() for key in _secret_keys(each, name)]


async def _look(connection: Connection, runs: Mapping[str, Submission]) -> dict[str, Standing]:
    """One request for each kind and namespace, however many runs there are."""
    here = {name: each for name, each in runs.items() if each.details.get("server") == connection.server}
    standings = {
        name: Standing(
            "unknown", each.job, sentence=f"it is on {each.details.get('server')}, which is not your context"
        )
        for name, each in runs.items()
        if name not in here
    }
    for namespace in sorted({each.details["namespace"] for each in here.values()}):
        inside = {name: each for name, each in here.items() if each.details["namespace"] == namespace}
        seen = await _seen(connection, namespace, {each.details["version"]: each.job for each in inside.values()})
        for name, each in inside.items():
            found = seen.get(each.job)
            standings[name] = standing_of(found) if found else Standing("ended", each.job, (), "Gone", "it was removed")
    return standings


async def _seen(connection: Connection, namespace: str, kinds: Mapping[str, str]) -> dict[str, Seen]:
    """KIND/NAME → everything there is of it."""
    versions = {version: job.partition("/")[0] for version, job in kinds.items()}
    owners_lists, pods = await asyncio.gather(
        asyncio.gather(
            *(connection.list(version, kind, namespace, labelSelector=OURS) for version, kind in versions.items())
        ),
        connection.list("v1", "Pod", namespace, labelSelector=OURS),
    )
    owners = [owner for listed in owners_lists for owner in listed]
    pods_of: dict[str, list[Manifest]] = {}
    for pod in pods:
        pods_of.setdefault(pod["metadata"]["labels"].get(INSTANCE, ""), []).append(pod)
    waiting = [owner for owner in owners if not _is_running(owner, pods_of.get(_instance_of(owner), []))]
    workloads, groups, events = await asyncio.gather(
        _workloads(connection, namespace, waiting),
        _pod_groups(connection, namespace, waiting),
        _events(connection, namespace, waiting),
    )
    found = {}
    for owner in owners:
        uid, instance = owner["metadata"]["uid"], _instance_of(owner)
        told = [each for each in events if _is_about(each, owner["metadata"]["name"])]
        seen = Seen(owner, pods_of.get(instance, []), workloads.get(uid), groups.get(uid), told)
        found[f"{owner['kind']}/{owner['metadata']['name']}"] = seen
    return found


async def _workloads(connection: Connection, namespace: str, owners: list[Manifest]) -> dict[str, Manifest]:
    """Owner's uid → Kueue's object for it."""
    uids = [each["metadata"]["uid"] for each in owners if "kueue.x-k8s.io/queue-name" in each["metadata"]["labels"]]
    found = {}
    for first in range(0, len(uids), MOST_NAMES):
        selector = f"kueue.x-k8s.io/job-uid in ({','.join(uids[first : first + MOST_NAMES])})"
        for each in await connection.list("kueue.x-k8s.io/v1beta2", "Workload", namespace, labelSelector=selector):
            found[each["metadata"]["labels"]["kueue.x-k8s.io/job-uid"]] = each
    return found


async def _pod_groups(connection: Connection, namespace: str, owners: list[Manifest]) -> dict[str, Manifest]:
    """Owner's uid → Volcano's or KAI's object for it, which both end in that uid."""
    versions = set()
    if any(each["apiVersion"] == KINDS["VolcanoJob"] for each in owners):
        versions.add("scheduling.volcano.sh/v1beta1")
    if any("kai.scheduler/queue" in each["metadata"]["labels"] for each in owners):
        versions.add("scheduling.run.ai/v2alpha2")
    found = {}
    for version in sorted(versions):
        for group in await connection.list(version, "PodGroup", namespace):
            uid = next(
                (
                    each["metadata"]["uid"]
                    for each in owners
                    if group["metadata"]["name"].endswith(each["metadata"]["uid"])
                ),
                "",
            )
            if uid:
                found[uid] = group
    return found


async def _events(connection: Connection, namespace: str, owners: list[Manifest]) -> list[Manifest]:
    if not owners:
        return []
    return await connection.list("v1", "Event", namespace, fieldSelector="type=Warning")


async def _read_logs(
    connection: Connection,
    submission: Submission,
    follow: bool,
    tail: int | None,
    lines: SimpleQueue[tuple[str, str] | None],
) -> None:
    namespace = submission.details["namespace"]
    pods = await connection.list("v1", "Pod", namespace, labelSelector=_selector(submission))
    if not pods:
        raise RunStateError(f"{submission.job} has no pods; `craton ps` says why it waits, or how it ended")

    async def read(pod: str) -> None:
        async for line in connection.log_lines(pod, namespace, follow, tail):
            lines.put((pod, line))

    started = [pod for pod in pods if (pod.get("status") or {}).get("phase") != "Pending"]
    await asyncio.gather(*(read(pod["metadata"]["name"]) for pod in started))


def _owner(submission: Submission) -> Manifest:
    kind, _, name = submission.job.partition("/")
    if not name or "namespace" not in submission.details:
        raise RunStateError("the run was not handed to Kubernetes; its backend.json names no object")
    metadata = {"name": name, "namespace": submission.details["namespace"]}
    return {"apiVersion": submission.details["version"], "kind": kind, "metadata": metadata}


def _selector(submission: Submission) -> str:
    return f"{OURS},{INSTANCE}={submission.job.partition('/')[2]}"


def _instance_of(owner: Manifest) -> str:
    return str(owner["metadata"]["labels"].get(INSTANCE, ""))


def _is_running(owner: Manifest, pods: list[Manifest]) -> bool:
    return ended_as(owner) is not None or (
        bool(pods) and all((pod.get("status") or {}).get("phase") in ("Running", "Succeeded") for pod in pods)
    )


def _is_about(event: Manifest, name: str) -> bool:
    """Objects that an owner makes are called like it, with something added."""
    about = str((event.get("involvedObject") or {}).get("name", ""))
    return about == name or about.startswith(f"{name}-")
