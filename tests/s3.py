"""A real S3 server for tests, and a proxy before it that breaks what it is told to break.

`bucket` gives an empty bucket as `s3://NAME` with the AWS environment pointing at the server; `faults` does the same
through a proxy whose `fail(...)` lets the next matching requests go wrong. The server is moto's, in its own process.
"""

from __future__ import annotations

import http.client
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Literal

import pytest
from waiting import PATIENCE_SECONDS

Kind = Literal["500", "503", "403", "404", "skewed", "stall", "drop", "truncate", "refuse", "slow"]
_REFUSALS = {
    "500": (500, "InternalError"),
    "503": (503, "SlowDown"),
    "403": (403, "AccessDenied"),
    "404": (404, "NotFound"),
    "skewed": (403, "RequestTimeTooSkewed"),
}
_NUMBERS = count()


class S3Server:
    """moto's server on a free port; its buckets live as long as it does."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if found := re.search(r"Running on http://127\.0\.0\.1:(\d+)", line):
                self.port = int(found[1])
                break
        else:
            raise RuntimeError("moto's S3 server ended before it listened")
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._process.stderr.read, daemon=True).start()  # a full pipe would stop the server

    def make_bucket(self, name: str) -> None:
        self._ask("PUT", f"/{name}")

    def objects(self, bucket: str) -> list[str]:
        """Every key of the bucket, asked of the server without our code."""
        return re.findall(r"<Key>([^<]*)</Key>", self._ask("GET", f"/{bucket}?list-type=2&max-keys=1000").decode())

    def open_uploads(self, bucket: str) -> list[str]:
        """The keys of multipart uploads that were begun and neither completed nor aborted."""
        return re.findall(r"<Key>([^<]*)</Key>", self._ask("GET", f"/{bucket}?uploads").decode())

    def replace(self, bucket: str, key: str, content: bytes) -> None:
        """Behind the back of our code."""
        self._ask("PUT", f"/{bucket}/{key}", content)

    def read(self, bucket: str, key: str) -> bytes:
        return self._ask("GET", f"/{bucket}/{key}")

    def delete(self, bucket: str, key: str) -> None:
        self._ask("DELETE", f"/{bucket}/{key}")

    def delete_bucket(self, bucket: str) -> None:
        for key in self.objects(bucket):
            self.delete(bucket, key)
        self._ask("DELETE", f"/{bucket}")

    def _ask(self, method: str, path: str, content: bytes | None = None) -> bytes:
        request = urllib.request.Request(f"{self.url}{path}", data=content, method=method)
        request.add_header("Content-Type", "application/octet-stream")
        # moto wants to see who asks, and does not check the signature
        request.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request")
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
            return bytes(answer.read())

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass
class Fault:
    """What goes wrong with the next `times` requests of this method whose path and query hold this text."""

    kind: Kind
    times: int = 10**9
    method: str = ""
    holding: str = ""
    seconds: float = 30.0  # for stall and slow
    over: threading.Event = field(default_factory=threading.Event)  # ends them sooner


class FaultProxy:
    """Stands before an S3 server; `seen` lists the requests (method, path) that came by."""

    def __init__(self, server: S3Server) -> None:
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self.seen: list[tuple[str, str]] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def pass_on(self) -> None:
                proxy._pass_on(self, server.port)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = pass_on  # noqa: N815

        self._listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._listener.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._listener.server_address[1]}"
        threading.Thread(target=self._listener.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def fail(self, kind: Kind, times: int = 10**9, method: str = "", holding: str = "", seconds: float = 30.0) -> Fault:
        """`times` in the answer counts down as the fault happens."""
        fault = Fault(kind, times, method, holding, seconds)
        with self._lock:
            self._faults.append(fault)
        return fault

    def heal(self) -> None:
        with self._lock:
            for fault in self._faults:
                fault.times = 0

    def stop(self) -> None:
        for fault in self._faults:
            fault.over.set()
        self._listener.shutdown()
        self._listener.server_close()

    def _next_fault(self, method: str, path: str) -> Fault | None:
        with self._lock:
            self.seen.append((method, path))
            for fault in self._faults:
                if fault.times > 0 and fault.method in ("", method) and fault.holding in path:
                    fault.times -= 1
                    return fault
        return None

    def _pass_on(self, request: BaseHTTPRequestHandler, port: int) -> None:
        fault = self._next_fault(request.command, request.path)
        kind = fault.kind if fault else None
        if kind == "refuse":
            self._hang_up(request)
            return
        length = int(request.headers.get("Content-Length") or 0)
        if kind == "drop" and length > 1:  # in the middle of what is sent to us
            request.rfile.read(length // 2)
            self._hang_up(request)
            return
        body = request.rfile.read(length)
        if fault and kind in _REFUSALS:
            status, code = _REFUSALS[fault.kind]
            text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
            request.send_response(status)
            request.send_header("Content-Length", str(len(text)))
            request.end_headers()
            if request.command != "HEAD":
                request.wfile.write(text)
            return
        if fault and kind in ("stall", "slow"):
            fault.over.wait(fault.seconds)
            if kind == "stall":
                self._hang_up(request)
                return
        self._answer(request, port, body, cut=kind in ("drop", "truncate"), hang_up=kind == "drop")

    def _answer(self, request: BaseHTTPRequestHandler, port: int, body: bytes, cut: bool, hang_up: bool) -> None:
        upstream = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
        try:
            upstream.request(request.command, request.path, body or None, dict(request.headers))
            answer = upstream.getresponse()
            content = answer.read()
        finally:
            upstream.close()
        sent = content[: len(content) // 2] if cut else content
        request.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                request.send_header(name, value)
        # A drop promises all and hangs up; a truncated answer is well-formed HTTP of half the object.
        size = answer.getheader("Content-Length") if request.command == "HEAD" else None
        request.send_header("Content-Length", size or str(len(content) if hang_up else len(sent)))
        request.end_headers()
        with suppress(ConnectionError):  # who no longer waits has hung up
            if request.command != "HEAD":
                request.wfile.write(sent)
            if hang_up:
                self._hang_up(request)

    @staticmethod
    def _hang_up(request: BaseHTTPRequestHandler) -> None:
        request.close_connection = True
        with suppress(OSError):
            request.connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def faults(s3_server: S3Server) -> Iterator[FaultProxy]:
    """A proxy before the server; a test that asks for `bucket` as well reaches that bucket through it."""
    proxy = FaultProxy(s3_server)
    yield proxy
    proxy.stop()


@pytest.fixture
def bucket(s3_server: S3Server, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """`s3://NAME` of a new bucket; whatever this test starts finds it through the environment."""
    through = request.getfixturevalue("faults") if "faults" in request.fixturenames else s3_server
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in aws_variables(through.url).items():
        monkeypatch.setenv(name, value)
    name = f"bucket-{next(_NUMBERS)}"
    s3_server.make_bucket(name)
    return f"s3://{name}"


def aws_variables(url: str) -> dict[str, str]:
    """What a process that was started earlier, such as a rank of the live gang, must set to find the server."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }
