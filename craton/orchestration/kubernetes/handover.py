"""Submit a run to a cluster so that an interruption never leaves a pod that no command can stop.

The run's ID is recorded before the cluster is asked to create it. The owner of the pods is created first; all other
objects belong to it and are deleted with it. On a refusal or Ctrl-C the objects are deleted and the record is restored.
After a missing response the record stays, because the owner may exist; its submission ID identifies it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace

from craton.formatting import setting
from craton.infrastructure import TopologyError
from craton.job import Job
from craton.orchestration.backend import BACKEND_FILE, Submission, read_submission, write_submission
from craton.orchestration.errors import NoAnswerError, RunStateError, SchedulerError
from craton.orchestration.kubernetes.api import ANSWER_SECONDS, Connection, KubernetesApiError
from craton.orchestration.kubernetes.places import Places, level_labels, places_of
from craton.orchestration.kubernetes.pods import (
    DIRECTORY_ANNOTATION,
    INSTANCE,
    MANAGED_BY,
    RUN_ANNOTATION,
    SUBMISSION_ANNOTATION,
    Manifest,
)
from craton.orchestration.kubernetes.standing import ended_as
from craton.orchestration.kubernetes.target import (
    MAX_FILE_BYTES,
    PLACES_FILE,
    SUBMISSION_VARIABLE,
    instance_types_of,
    nodes_map_of,
)
from craton.telemetry import RunDirectory

SUBMISSION = "submission"  # identifies this owner among others of its name
PENDING = "pending"  # no response yet on whether the cluster has it
LEAVE_SECONDS = 180.0  # for the pods of an object that is being deleted
NODES_SECONDS = 10.0  # for a list of the cluster's nodes
LOOK_UP_SECONDS, LOOK_SECONDS = 10.0, 0.2  # lookup of an owner whose creation got no response; between two lookups
CONFLICT = 409
GATEWAYS = (502, 504)  # gateway timeouts: the API server may still execute the request


class HandoverRecord:
    """A run's backend.json during submission: pending before an owner is created, and restored by the caller only if
    nothing can be left on the cluster."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.before = read_submission(run) if (run.path / BACKEND_FILE).exists() else None
        self._may_be_there = False

    def pend(self, submission: Submission) -> None:
        self._may_be_there = True
        write_submission(self.run, submission)

    def nothing_is_left(self) -> None:
        self._may_be_there = False

    def put_back(self) -> None:
        if self._may_be_there:
            return
        if self.before is None:
            (self.run.path / BACKEND_FILE).unlink(missing_ok=True)
        else:
            write_submission(self.run, self.before)


async def hand_over(
    connection: Connection, record: HandoverRecord, job: Job, documents: list[Manifest], environment: Mapping[str, str]
) -> Submission:
    """Create the objects of a run. The record says whether an error may leave something on the cluster."""
    owner, *around = documents
    nodes_map = nodes_map_of(owner["metadata"]["name"])
    has_map = any(item["metadata"]["name"] == nodes_map for item in around)
    places = asyncio.create_task(_places(connection, job)) if has_map else None
    try:
        return await _create_all(connection, record, documents, environment, places)
    finally:
        if places is not None:
            places.cancel()


def is_own(owner: Manifest, submission: Submission) -> bool:
    """Whether an object of the right name is the submitted one; older records have no submission ID."""
    return submission.details.get(SUBMISSION) in (None, _submission_of(owner))


def is_own_pod(pod: Manifest, submission: Submission) -> bool:
    """Like `is_own`, for a pod, by its environment."""
    if (pod["metadata"].get("labels") or {}).get(INSTANCE) != submission.job.partition("/")[2]:
        return False
    containers = (pod.get("spec") or {}).get("containers") or ()
    env = [entry for container in containers for entry in container.get("env") or ()]
    messages = [item.get("value") for item in env if item["name"] == SUBMISSION_VARIABLE]
    return submission.details.get(SUBMISSION) in (None, *messages)


def is_pending(submission: Submission) -> bool:
    return PENDING in submission.details


def completed(submission: Submission) -> Submission:
    """Return the record of a pending submission that the cluster has."""
    details = {name: value for name, value in submission.details.items() if name != PENDING}
    return replace(submission, details=details)


def is_fresh(run: RunDirectory) -> bool:
    """Whether the run was submitted so recently that the cluster may still create it."""
    try:
        age_seconds = time.time() - (run.path / BACKEND_FILE).stat().st_mtime
        return abs(age_seconds) < 2 * ANSWER_SECONDS  # the clock may have been set back
    except OSError:
        return False


async def _create_all(
    connection: Connection,
    record: HandoverRecord,
    documents: list[Manifest],
    environment: Mapping[str, str],
    places: asyncio.Task[Places] | None,
) -> Submission:
    from anyio.lowlevel import checkpoint

    owner, *around = documents
    created = await _create_owner(connection, record, owner)
    reference = {
        "apiVersion": created["apiVersion"],
        "kind": created["kind"],
        "name": created["metadata"]["name"],
        "uid": created["metadata"]["uid"],
    }
    missing = ""
    try:
        await checkpoint()  # a Ctrl-C that came while the owner was created
        for document in around:
            document["metadata"]["ownerReferences"] = [reference]
            if document["kind"] == "Secret":
                document = _with_values(document, owner, environment)
            if places is not None and document["metadata"]["name"] == nodes_map_of(owner["metadata"]["name"]):
                document = {**document, "data": {PLACES_FILE: (await places).to_text()}}
            try:
                await connection.create(document)
            except KubernetesApiError as error:
                if document["kind"] != "NetworkPolicy" or error.status != 403:
                    raise
                missing = f"other pods in the cluster can connect to its pods: {error}"
        await checkpoint()
    except BaseException as error:  # Ctrl-C too
        await _take_back(connection, record, owner, error)
        raise
    submission = completed(_pending(connection, owner))
    return replace(submission, details={**submission.details, "warning": missing}) if missing else submission


async def _take_back(connection: Connection, record: HandoverRecord, owner: Manifest, why: BaseException) -> None:
    """Delete the created objects, also while the submission is being cancelled."""
    from anyio import CancelScope

    with CancelScope(shield=True):
        try:
            await connection.delete(owner)
        except SchedulerError as error:
            raise RunStateError(
                f"{_in_words(owner)} was created, could not be completed ({str(why) or type(why).__name__}) and could "
                f"not be deleted ({error}); the run is kept: `craton stop {record.run.name}` removes it"
            ) from None
    record.nothing_is_left()


async def _create_owner(connection: Connection, record: HandoverRecord, owner: Manifest) -> Manifest:
    """Create the owner, replacing an ended one of the same run; objects of others are left alone."""
    if record.before is not None:
        await _make_room(connection, record, owner)
    try:
        return await _create_on_record(connection, record, owner)
    except KubernetesApiError as error:
        if error.status != CONFLICT:
            raise
    await _make_room(connection, record, owner)
    return await _create_on_record(connection, record, owner)


async def _make_room(connection: Connection, record: HandoverRecord, owner: Manifest) -> None:
    """Delete an ended owner of the same run, and wait for its pods, which may outlive it."""
    there = await connection.read(owner)
    if there is not None:
        if not _is_of_the_same_run(there, owner):
            raise RunStateError(
                f"{_in_words(owner)} already exists on the cluster and belongs to another run; choose another name "
                "with `--name`"
            )
        if ended_as(there) is None and not there["metadata"].get("deletionTimestamp"):
            namespace = owner["metadata"].get("namespace") or connection.namespace
            by_hand = f"kubectl delete {owner['kind'].lower()} {owner['metadata']['name']} -n {namespace}"
            verb = by_hand if record.before is None else f"craton stop {record.run.name}"
            raise RunStateError(
                f"{_in_words(owner)} already exists on the cluster and has not ended; `{verb}` ends it, `--name` "
                "starts another"
            )
        await connection.delete(owner)
    await _wait_until_gone(connection, owner)


async def _create_on_record(connection: Connection, record: HandoverRecord, owner: Manifest) -> Manifest:
    """Create the owner. Ctrl-C waits for the response: only an object known to exist can be deleted for certain."""
    from anyio import CancelScope

    record.pend(_pending(connection, owner))
    try:
        with CancelScope(shield=True):
            created = await connection.create(owner)
    except SchedulerError as error:
        is_open = isinstance(error, NoAnswerError) or (
            isinstance(error, KubernetesApiError) and error.status in GATEWAYS
        )
        may_be_there = is_open or (isinstance(error, KubernetesApiError) and error.status >= 500)
        result, is_settled = await _looked_up(connection, owner, is_open) if may_be_there else (None, True)
        if result is not None:
            return result
        if is_settled:
            record.nothing_is_left()
            raise
        raise RunStateError(
            f"{error}. It is unknown whether {_in_words(owner)} was created, so the run is kept: `craton ps` shows it "
            f"once the cluster lists it; if it never does, `craton resume {record.run.name}` submits it again"
        ) from None
    return created


async def _looked_up(connection: Connection, owner: Manifest, is_open: bool) -> tuple[Manifest | None, bool]:
    """Look up the owner; return (owner or None, whether this is final). While `is_open`, the cluster may still be
    creating it, so its absence proves nothing."""
    deadline = time.monotonic() + LOOK_UP_SECONDS
    while True:
        with contextlib.suppress(SchedulerError):
            there = await connection.read(owner)
            if there is not None and _submission_of(there) == _submission_of(owner):
                return there, True
            if not is_open:
                return None, True
        if time.monotonic() > deadline:
            return None, False
        await asyncio.sleep(LOOK_SECONDS)


def _pending(connection: Connection, owner: Manifest) -> Submission:
    metadata = owner["metadata"]
    details = {
        "namespace": metadata.get("namespace") or connection.namespace,
        "server": connection.server,
        "version": owner["apiVersion"],
        "directory": metadata["annotations"][DIRECTORY_ANNOTATION],
        SUBMISSION: metadata["annotations"][SUBMISSION_ANNOTATION],
        PENDING: "yes",
    }
    return Submission("kubernetes", f"{owner['kind']}/{metadata['name']}", details)


def _submission_of(owner: Manifest) -> str | None:
    return (owner["metadata"].get("annotations") or {}).get(SUBMISSION_ANNOTATION)


def _in_words(owner: Manifest) -> str:
    return f"{owner['kind']} {owner['metadata']['name']}"


def _is_of_the_same_run(there: Manifest, ours: Manifest) -> bool:
    labels, noted = (there["metadata"].get(key) or {} for key in ("labels", "annotations"))
    wanted = ours["metadata"]["annotations"]
    keys = (RUN_ANNOTATION, DIRECTORY_ANNOTATION)
    return labels.get(MANAGED_BY) == "craton" and all(noted.get(key) == wanted[key] for key in keys)


async def _wait_until_gone(connection: Connection, owner: Manifest) -> None:
    """Wait until the owner and its pods are gone: pods of two submissions must not share the run directory."""
    namespace = owner["metadata"].get("namespace") or connection.namespace
    selector = f"{INSTANCE}={owner['metadata']['labels'][INSTANCE]}"
    deadline = time.monotonic() + LEAVE_SECONDS
    while await connection.read(owner) or await connection.list("v1", "Pod", namespace, labelSelector=selector):
        if time.monotonic() > deadline:
            raise RunStateError(
                f"the pods of {owner['metadata']['name']} did not terminate within {setting(LEAVE_SECONDS)}; try again "
                f"later (list them with `kubectl get pods -l {selector}`)"
            )
        await asyncio.sleep(LOOK_SECONDS)


async def _places(connection: Connection, job: Job) -> Places:
    """Read the topology of the nodes that a job may use. A failure does not prevent the start."""
    kinds = instance_types_of(job)
    selectors = {"labelSelector": f"node.kubernetes.io/instance-type in ({','.join(kinds)})"} if kinds else {}
    try:
        nodes = await asyncio.wait_for(connection.list_nodes(**selectors), NODES_SECONDS)
        places = places_of(nodes, level_labels(job))
    except KubernetesApiError as error:
        if error.status == 403:
            return Places(why="the submitting user may not list the nodes of the cluster")
        return Places(why=f"the cluster did not list its nodes: {error}")
    except (SchedulerError, TopologyError) as error:
        return Places(why=str(error))
    except TimeoutError:
        return Places(why=f"the cluster did not list its nodes within {setting(NODES_SECONDS)}")
    if len(places.to_text()) > MAX_FILE_BYTES:
        return Places(why=f"the topology of {len(places.addresses):,} nodes does not fit into a ConfigMap")
    return places


def _with_values(secret: Manifest, owner: Manifest, environment: Mapping[str, str]) -> Manifest:
    """Return the Secret with the values that the pods refer to."""
    name = secret["metadata"]["name"]
    wanted = [secret_key for secret_key in _secret_keys(owner, name) if secret_key in environment]
    return {**secret, "data": {item: base64.b64encode(environment[item].encode()).decode() for item in wanted}}


def _secret_keys(part: object, name: str) -> list[str]:
    """Return the keys of a Secret that a manifest refers to."""
    if isinstance(part, list):
        return [key for element in part for key in _secret_keys(element, name)]
    if not isinstance(part, dict):
        return []
    source = part.get("secret")
    own = [item["key"] for item in source["items"]] if isinstance(source, dict) and source.get("name") == name else []
    return own + [key for entry in part.values() for key in _secret_keys(entry, name)]
