"""The Kubernetes API calls that Craton needs, through kr8s: create, list, patch, delete, read logs.

kr8s finds the cluster and the credentials (KUBECONFIG, ~/.kube/config, a pod's service account, login plugins). Craton
uses its lowest level, because objects are sent exactly as emitted, with unknown fields refused, and because a list of
each kind is one request for any number of runs.
"""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from craton.extras import require_extra
from craton.orchestration.errors import NoAnswerError, SchedulerError, StartError
from craton.orchestration.kubernetes.pods import Manifest

if TYPE_CHECKING:
    from httpx import Response
    from kr8s.asyncio import Api

logger = logging.getLogger(__name__)

PAGE = 500  # objects per response
ANSWER_SECONDS = 30.0
# Plural names in URLs. API discovery would return them too, with one request per API group.
PLURALS = {
    "ConfigMap": "configmaps",
    "Event": "events",
    "Job": "jobs",
    "JobSet": "jobsets",
    "LeaderWorkerSet": "leaderworkersets",
    "NetworkPolicy": "networkpolicies",
    "Node": "nodes",
    "Pod": "pods",
    "PodGroup": "podgroups",
    "Secret": "secrets",
    "Service": "services",
    "Workload": "workloads",
}
CLUSTER_WIDE = ("Node",)  # without a namespace
EVERY_NAMESPACE = "*"  # lists all namespaces
# Lists metadata only. A Node with its images and conditions is many times as large.
METADATA_ONLY = {"Accept": "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"}

Answer = TypeVar("Answer")
Manifests = list[Manifest]  # an alias, because `Connection` has a method `list`


class KubernetesApiError(SchedulerError):
    """The API server refused; `status` is the HTTP status."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


def load_kr8s() -> Any:
    """Import the client, or say what to install. The import takes a third of a second, before any request."""
    require_extra("kubernetes", "a run on Kubernetes")
    try:
        import kr8s.asyncio
    except ImportError as error:
        raise StartError(f"kr8s, the client for Kubernetes, is installed but cannot be imported: {error}") from None
    return kr8s


class Connection:
    """An open connection to one cluster; `ask` creates it."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self.namespace = str(api.namespace)

    @property
    def server(self) -> str:
        return str(self._api.auth.server)

    async def create(self, manifest: Manifest) -> Manifest:
        """Create an object; unknown and duplicate fields are errors."""
        return await self._ask("POST", manifest, params={"fieldValidation": "Strict"}, content=json.dumps(manifest))

    async def patch(self, manifest: Manifest, patch: Manifest) -> Manifest:
        """Apply a JSON merge patch (RFC 7386): null removes, a list is replaced as a whole."""
        name, kind = manifest["metadata"]["name"], {"Content-Type": "application/merge-patch+json"}
        return await self._ask("PATCH", manifest, name, content=json.dumps(patch), headers=kind)

    async def delete(self, manifest: Manifest) -> bool:
        """Delete an object and everything it owns; False if it does not exist."""
        options = {"propagationPolicy": "Background"}
        try:
            await self._ask("DELETE", manifest, manifest["metadata"]["name"], content=json.dumps(options))
        except KubernetesApiError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def delete_pods(self, namespace: str, selector: str, grace_seconds: int) -> None:
        place = {"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": namespace}}
        options = json.dumps({"gracePeriodSeconds": grace_seconds})
        await self._ask("DELETE", place, params={"labelSelector": selector}, content=options)

    async def read(self, manifest: Manifest) -> Manifest | None:
        try:
            return await self._ask("GET", manifest, manifest["metadata"]["name"])
        except KubernetesApiError as error:
            if error.status == 404:
                return None
            raise

    async def list(self, version: str, kind: str, namespace: str, **selectors: str) -> Manifests:
        """List all objects of a kind in a namespace; empty if the cluster does not know the kind."""
        try:
            return await self._all(version, kind, namespace, selectors)
        except KubernetesApiError as error:
            if error.status == 404:
                return []
            raise

    async def list_if_shown(
        self, versions: Sequence[str], kind: str, namespace: str, **selectors: str
    ) -> Manifests | None:
        """Like `list`, for the first of these versions that the cluster knows; None without permission."""
        for version in versions:
            try:
                return await self._all(version, kind, namespace, selectors)
            except KubernetesApiError as error:
                if error.status == 403:
                    return None
                if error.status != 404:
                    raise
        return []

    async def list_nodes(self, **selectors: str) -> Manifests:
        """List names and labels of the cluster's nodes."""
        return await self._all("v1", "Node", "", selectors, headers=METADATA_ONLY)

    async def _all(
        self, version: str, kind: str, namespace: str, selectors: Mapping[str, str], **arguments: Any
    ) -> Manifests:
        manifests: Manifests = []
        query: dict[str, str] = {"limit": str(PAGE), **selectors}
        place = {"apiVersion": version, "kind": kind, "metadata": {"namespace": namespace}}
        while True:
            page = await self._ask("GET", place, params=query, **arguments)
            # Items of a list carry no kind.
            manifests += [{"apiVersion": version, "kind": kind, **item} for item in page.get("items") or ()]
            token = (page.get("metadata") or {}).get("continue")
            if not token:
                return manifests
            query = {**query, "continue": token}

    async def log_lines(self, pod: str, namespace: str, follow: bool, tail: int | None) -> AsyncIterator[str]:
        query = {"follow": str(follow).lower(), **({} if tail is None else {"tailLines": str(tail)})}
        with translated():
            async with self._api.call_api(
                "GET",
                version="v1",
                namespace=namespace,
                url=f"pods/{pod}/log",
                params=query,
                stream=True,
                timeout=None,
                raise_for_status=False,
            ) as response:
                if response.is_error:
                    await response.aread()
                else:
                    async for line in response.aiter_lines():
                        yield line
        _check(response)

    async def _ask(self, method: str, manifest: Mapping[str, Any], name: str = "", **arguments: Any) -> Manifest:
        namespace = manifest["metadata"].get("namespace") or self.namespace
        if manifest["kind"] in CLUSTER_WIDE or namespace == EVERY_NAMESPACE:
            namespace = ""
        address = "/".join(filter(None, [PLURALS[manifest["kind"]], name]))
        call = {"version": manifest["apiVersion"], "namespace": namespace, "url": address, **arguments}
        start = time.monotonic()
        with translated():
            # kr8s takes every error status for an expired login: it would retry four times and abort all concurrent
            # requests to log in again. Only a 401 is worth that.
            async with self._api.call_api(method, raise_for_status=False, **call) as response:
                pass
            if response.status_code == 401:
                async with self._api.call_api(method, **call) as response:
                    pass
        logger.debug(
            "%s %s of %s: %d after %.2f s",
            method,
            address,
            namespace or "the cluster",
            response.status_code,
            time.monotonic() - start,
        )
        _check(response)
        answer = response.json()
        assert isinstance(answer, dict)
        return answer


def ask(question: Callable[[Connection], Awaitable[Answer]]) -> Answer:
    """Query the cluster of the caller's configuration, in a separate event loop: a notebook already has one."""
    kr8s = load_kr8s()
    from anyio.from_thread import start_blocking_portal

    async def connected() -> Answer:
        with translated(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a cluster newer than the client
            api = await kr8s.asyncio.api()
        api.timeout = ANSWER_SECONDS
        return await question(Connection(api))

    with start_blocking_portal() as portal:
        return portal.call(connected)


@contextmanager
def translated() -> Iterator[None]:
    """Translate errors of the client and the network into SchedulerError."""
    import httpx
    import kr8s

    try:
        yield
    except kr8s.ServerError as error:
        status = error.response.status_code if error.response is not None else 0
        raise KubernetesApiError(_refusal(str(error), status), status) from None
    except (httpx.HTTPError, kr8s.APITimeoutError, kr8s.ConnectionClosedError, OSError) as error:
        message = str(error) or type(error).__name__
        is_unsent = isinstance(error, httpx.ConnectError | OSError)
        raise (SchedulerError if is_unsent else NoAnswerError)(
            f"the Kubernetes cluster does not respond ({message}); check with `kubectl cluster-info`"
        ) from None
    except (KeyError, ValueError) as error:
        raise SchedulerError(
            f"no Kubernetes cluster found ({error}); set KUBECONFIG, or run `kubectl config use-context NAME`"
        ) from None


def _check(response: Response) -> None:
    if not response.is_error:
        return
    try:
        text = str(response.json()["message"])
    except (ValueError, KeyError, TypeError):  # of a proxy, for example
        text = response.text or f"status {response.status_code}"
    raise KubernetesApiError(_refusal(text, response.status_code), response.status_code)


def _refusal(text: str, status: int) -> str:
    if status == 401:
        return f"the Kubernetes cluster rejects your credentials ({text}); log in again"
    if status == 403:
        return f"Kubernetes forbids it: {text}; request that permission, or set another `namespace:`"
    if status == 404:
        return f"not found in Kubernetes: {text}; check that the scheduler of the cluster file's `gang:` is installed"
    return f"Kubernetes refused: {text}"
