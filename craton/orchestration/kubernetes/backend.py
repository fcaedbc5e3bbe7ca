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
from craton.orchestration.kubernetes.logs import read_logs
from craton.orchestration.kubernetes.objects import OURS, seen_of
from craton.orchestration.kubernetes.pods import DIRECTORY_ANNOTATION, INSTANCE, MANAGED_BY, RUN_ANNOTATION, Manifest
from craton.orchestration.kubernetes.standing import ended_as, standing_of
from craton.orchestration.kubernetes.target import Target, target_of
from craton.telemetry import RunDirectory, RunError, runs_root

MANIFEST_FILE = "kubernetes.yaml"
LEAVE_SECONDS = 180.0  # for the pods of an object that is being removed
LOOK_SECONDS = 0.2
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
        to checkpoint. A server is always told so: its owner would start again whatever ends by itself. A resume hands
        the run in again."""
        if is_elsewhere(run) or read_submission(run).job.startswith("LeaderWorkerSet/"):
            self._end(run, None)

    def logs(self, run: RunDirectory, *, follow: bool = False, tail: int | None = None) -> Iterator[tuple[str, str]]:
        """(pod, line) of all pods, from the cluster; a line of a rank begins with `[rank N]`. When following, of those
        that come later too, until the run has ended."""
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


def is_elsewhere(run: RunDirectory) -> bool:
    """Whether the pods of a run write another directory than the one that is seen here."""
    submission = read_submission(run)
    return submission.on == "kubernetes" and submission.details.get("directory") != str(run.path)


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
    """In place of one of the same run that has ended; what belongs to anybody else is left alone."""
    try:
        return await connection.create(owner)
    except ApiError as error:
        if error.status != 409:
            raise
    there = await connection.read(owner)
    if there is not None:
        if not _is_of_the_same_run(there, owner):
            raise RunStateError(
                f"{owner['kind']} {owner['metadata']['name']} is on the cluster already, and not of this run; `--name` "
                "starts one of another name"
            )
        if ended_as(there) is None and not there["metadata"].get("deletionTimestamp"):
            raise RunStateError(
                f"{owner['kind']} {owner['metadata']['name']} is on the cluster already and has not ended; `craton "
                f"stop {run.name}` ends it, `--name` starts another"
            )
        await connection.delete(owner)
        await _wait_until_gone(connection, owner)
    return await connection.create(owner)


def _is_of_the_same_run(there: Manifest, ours: Manifest) -> bool:
    labels, noted = (there["metadata"].get(key) or {} for key in ("labels", "annotations"))
    wanted = ours["metadata"]["annotations"]
    keys = (RUN_ANNOTATION, DIRECTORY_ANNOTATION)
    return labels.get(MANAGED_BY) == "craton" and all(noted.get(key) == wanted[key] for key in keys)


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
        seen = await seen_of(connection, namespace, {each.details["version"]: each.job for each in inside.values()})
        for name, each in inside.items():
            found = seen.get(each.job)
            standings[name] = standing_of(found) if found else Standing("ended", each.job, (), "Gone", "it was removed")
    return standings


def _owner(submission: Submission) -> Manifest:
    kind, _, name = submission.job.partition("/")
    if not name or "namespace" not in submission.details:
        raise RunStateError("the run was not handed to Kubernetes; its backend.json names no object")
    metadata = {"name": name, "namespace": submission.details["namespace"]}
    return {"apiVersion": submission.details["version"], "kind": kind, "metadata": metadata}


def _selector(submission: Submission) -> str:
    return f"{OURS},{INSTANCE}={submission.job.partition('/')[2]}"
