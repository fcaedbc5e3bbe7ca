"""A stand-in for an API server: it keeps objects, refuses unknown fields and names that are taken, and answers lists.

It is not Kubernetes: nothing is scheduled and no controller runs; a test puts in what they would have made. With a real
cluster, test_kubernetes_cluster.py asks the same client the same things.
"""

from __future__ import annotations

import copy
import json
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml
from kubernetes_schemas import problems

TOKEN = "a-token-that-is-asked-for"
_ADDRESS = re.compile(
    r"/apis?/(?P<version>(?:[^/]+/)?v[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[^/]+)(?:/(?P<name>[^/]+)(?P<log>/log)?)?"
)


class StandIn(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[tuple[str, str, str, str], dict[str, Any]] = {}  # (version, plural, namespace, name)
        self.requests: list[str] = []
        self.logs: dict[str, list[str]] = {}
        self.unreadable_logs: set[str] = set()  # pods
        self.forbidden: set[str] = set()  # plurals that may not be created
        self.hidden: set[str] = set()  # plurals that may not be listed; */pods: not those of all namespaces
        self.absent: set[str] = set()  # versions that this cluster does not know
        self.before_patch: Callable[[dict[str, Any]], None] = lambda _: None  # what somebody else does meanwhile
        self.before_answer: Callable[[str], None] = lambda _: None  # "POST /apis/…"; ConnectionError: none comes
        self.page = 500
        self.busy_seconds = 0.0  # answering
        self.lock = threading.Lock()
        self.kubeconfig = folder / "kubeconfig"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "lab", "cluster": {"server": f"http://127.0.0.1:{self.server_port}"}}],
            "users": [{"name": "ada", "user": {"token": TOKEN}}],
            "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "ada", "namespace": "team"}}],
            "current-context": "lab",
        }
        self.kubeconfig.write_text(yaml.safe_dump(config))
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that breaks off is its own affair."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def put(self, version: str, plural: str, manifest: dict[str, Any], namespace: str = "train") -> None:
        """As a controller would."""
        manifest["metadata"].setdefault("uid", str(uuid.uuid4()))
        self.objects[version, plural, namespace, manifest["metadata"]["name"]] = manifest

    def of(self, plural: str) -> list[dict[str, Any]]:
        return [each for (_, kind, _, _), each in self.objects.items() if kind == plural]

    def remove(self, key: tuple[str, str, str, str]) -> None:
        """With everything that it owns."""
        gone = self.objects.pop(key, None)
        if gone is None:
            return
        for other, each in list(self.objects.items()):
            owners = each["metadata"].get("ownerReferences") or ()
            if any(owner["uid"] == gone["metadata"]["uid"] for owner in owners):
                self.remove(other)


class _Handler(BaseHTTPRequestHandler):
    server: StandIn
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # head and body in one packet: the second of two waits 40 ms for the first to be acknowledged

    def _any(self) -> None:
        begin = time.monotonic()
        self._route()
        self.server.busy_seconds += time.monotonic() - begin

    def _route(self) -> None:
        address = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(address.query).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._fail(401, "Unauthorized")
        if address.path.rstrip("/") == "/version":
            return self._answer({"gitVersion": "v1.34.0"})
        self.server.requests.append(f"{self.command} {self.path}")
        found = _ADDRESS.fullmatch(address.path)
        if found is None:
            return self._fail(404, "the server could not find the requested resource")
        with self.server.lock:
            key = (found["version"], found["plural"], found["namespace"] or "", found["name"] or "")
            if found["version"] in self.server.absent:
                return self._fail(404, "the server could not find the requested resource")
            if found["log"]:
                return self._log(found["name"])
            if self.command == "POST":
                return self._create(key, query, json.loads(body))
            if self.command == "DELETE":
                return self._delete(key, query)
            if self.command == "PATCH":
                return self._patch(key, json.loads(body))
            return self._read(key, query)

    do_GET = do_POST = do_PATCH = do_DELETE = _any  # noqa: N815 - as the base class calls them

    def _create(self, key: tuple[str, str, str, str], query: dict[str, str], manifest: dict[str, Any]) -> None:
        if key[1] in self.server.forbidden:
            return self._fail(403, f'{key[1]} is forbidden: User "ada" cannot create resource "{key[1]}"')
        if query.get("fieldValidation") == "Strict" and (wrong := problems(manifest)):
            return self._fail(400, f"strict decoding error: {wrong[0]}")
        key = (*key[:3], manifest["metadata"]["name"])
        if key in self.server.objects:
            return self._fail(409, f'{key[1]} "{key[3]}" already exists')
        made = copy.deepcopy(manifest)
        made["metadata"] |= {"uid": str(uuid.uuid4()), "namespace": key[2]}
        self.server.objects[key] = made
        return self._answer(made, 201)

    def _delete(self, key: tuple[str, str, str, str], query: dict[str, str]) -> None:
        if key[3]:
            if key not in self.server.objects:
                return self._fail(404, f'{key[1]} "{key[3]}" not found')
            self.server.remove(key)
        for other, each in list(self.server.objects.items()) if not key[3] else ():
            if other[:3] == key[:3] and _matches(each, query.get("labelSelector", "")):
                self.server.remove(other)
        return self._answer({"status": "Success"})

    def _patch(self, key: tuple[str, str, str, str], patch: dict[str, Any]) -> None:
        """A JSON merge patch, refused when it was made from another version of the object."""
        if key[1] in self.server.forbidden:
            return self._fail(403, f'{key[1]} "{key[3]}" is forbidden: User "ada" cannot patch resource "{key[1]}"')
        if self.headers.get("Content-Type") != "application/merge-patch+json":
            return self._fail(415, "the body of the request was in an unknown format")
        made = self.server.objects.get(key)
        if made is None:
            return self._fail(404, f'{key[1]} "{key[3]}" not found')
        self.server.before_patch(made)
        version = (patch.get("metadata") or {}).get("resourceVersion")
        if version not in (None, made["metadata"].get("resourceVersion")):
            return self._fail(409, "the object has been modified; please apply your changes to the latest version")
        _merge(made, patch)
        made["metadata"]["resourceVersion"] = str(int(made["metadata"].get("resourceVersion", "0")) + 1)
        return self._answer(made)

    def _read(self, key: tuple[str, str, str, str], query: dict[str, str]) -> None:
        if key[3]:
            made = self.server.objects.get(key)
            return self._answer(made) if made else self._fail(404, f'{key[1]} "{key[3]}" not found')
        if {key[1], f"{key[2] or '*'}/{key[1]}"} & self.server.hidden:
            return self._fail(403, f'{key[1]} is forbidden: User "ada" cannot list resource "{key[1]}"')
        items = [
            {name: value for name, value in each.items() if name not in ("apiVersion", "kind")}
            for other, each in sorted(self.server.objects.items())
            if other[:2] == key[:2] and key[2] in ("", other[2])
            if _matches(each, query.get("labelSelector", "")) and _is_none_of(each, query.get("fieldSelector", ""))
        ]
        first, limit = int(query.get("continue", "0")), min(int(query["limit"]), self.server.page)
        rest = {"continue": str(first + limit)} if first + limit < len(items) else {}
        page = items[first : first + limit]
        if "as=PartialObjectMetadataList" in self.headers.get("Accept", ""):
            page = [{"metadata": each["metadata"]} for each in page]
        return self._answer({"metadata": rest, "items": page})

    def _log(self, pod: str) -> None:
        if pod in self.server.unreadable_logs:
            return self._fail(400, f"container node in pod {pod} is waiting to start")
        text = "".join(f"{line}\n" for line in self.server.logs.get(pod, ())).encode()
        return self._send(200, text, "text/plain")

    def _answer(self, document: dict[str, Any], status: int = 200) -> None:
        self._send(status, json.dumps(document).encode(), "application/json")

    def _fail(self, status: int, message: str) -> None:
        self._answer({"kind": "Status", "status": "Failure", "message": message, "code": status}, status)

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.server.before_answer(f"{self.command} {self.path}")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the base class has it
        pass


def _merge(made: dict[str, Any], patch: dict[str, Any]) -> None:
    """RFC 7386: null removes, objects are merged, all else is replaced."""
    for name, value in patch.items():
        if value is None:
            made.pop(name, None)
        elif isinstance(value, dict):
            _merge(made.setdefault(name, {}), value)
        else:
            made[name] = value


def _matches(thing: dict[str, Any], selector: str) -> bool:
    labels = thing["metadata"].get("labels") or {}
    for part in filter(None, re.split(r",(?![^(]*\))", selector)):
        if several := re.fullmatch(r"(\S+) in \(([^)]*)\)", part):
            if labels.get(several[1]) not in several[2].split(","):
                return False
        elif labels.get(part.partition("=")[0]) != part.partition("=")[2]:
            return False
    return True


def _is_none_of(thing: dict[str, Any], selector: str) -> bool:
    """`status.phase!=Failed`: of the operators, the one that is asked with."""
    for part in filter(None, selector.split(",")):
        path, _, value = part.partition("!=")
        found: Any = thing
        for name in path.split("."):
            found = (found or {}).get(name)
        if found == value:
            return False
    return True
