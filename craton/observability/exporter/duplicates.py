"""Families that a node_exporter on this node serves already, so that ours leaves them out.

Asked in the background, now and then: it may be started or stopped at any time. A scrape takes the last answer and
never waits. Only names that its scrape really contains count; where it does not answer, ours serves everything.
"""

from __future__ import annotations

import re
import socket
import sys
import threading
import time

from craton.errors import CratonError
from craton.observability.exporter.families import FAMILIES

NODE_EXPORTER_URL = "http://127.0.0.1:9100/metrics"
ASK_SECONDS = 60.0
ANSWER_SECONDS = 3.0  # for the whole answer
MAX_ANSWER_BYTES = 8 << 20  # a node of 192 processors and 32 network cards has less than 1 MiB
_CHUNK_BYTES = 64 << 10
_URL = re.compile(r"http://(?:\[([^\]/]+)\]|([^/]+)):(\d{1,5})(/\S*)?")
_SAMPLE = re.compile(rb"^([A-Za-z_]\w*)[{ ]", re.MULTILINE)
_HTTP_OK = re.compile(rb"HTTP/1\.[01] 200\b")
_OURS = "craton_exporter_info"


class DuplicateFamilies:
    """`names` is what the exporter at `url` had when it was last asked; empty where none answers."""

    def __init__(self, url: str = NODE_EXPORTER_URL, ask_seconds: float = ASK_SECONDS) -> None:
        self.url = url
        self.names: frozenset[str] = frozenset()
        self._address = _parse_url(url)
        self._ask_seconds = ask_seconds
        self._said = ""
        self._asked, self._ended = threading.Event(), threading.Event()
        # A daemon: a name that does not resolve may hold it for longer than the process has left.
        self._thread = threading.Thread(target=self._ask_forever, name="node_exporter", daemon=True)
        self._thread.start()

    def wait_first(self) -> None:
        """Return once it was asked for the first time, or after ANSWER_SECONDS."""
        self._asked.wait(ANSWER_SECONDS)

    def close(self) -> None:
        self._ended.set()

    def _ask_forever(self) -> None:
        while True:
            self.names = self._ask()
            self._asked.set()
            if self._ended.wait(self._ask_seconds):
                return

    def _ask(self) -> frozenset[str]:
        try:
            names = {name.decode() for name in _SAMPLE.findall(_fetch(*self._address))}
        except ConnectionRefusedError:
            return frozenset()  # none runs here, which is nothing to say
        except (OSError, ValueError) as error:
            self._say(f"{self.url} cannot be read, so everything is served: {type(error).__name__}: {error}")
            return frozenset()
        if _OURS in names:  # itself perhaps: two of ours that leave out what the other has would serve nothing
            self._say(f"{self.url} is an exporter of Craton and no node_exporter, so everything is served")
            return frozenset()
        return frozenset(name for name in names if name.startswith("node_") and name in FAMILIES)

    def _say(self, problem: str) -> None:
        """On the error output, once: a problem mostly stays from one look to the next."""
        if problem != self._said:
            print(problem, file=sys.stderr, flush=True)
            self._said = problem


def find_duplicates(asked: str) -> DuplicateFamilies | None:
    """`off`, or the address of a node_exporter. CratonError where it is neither."""
    return None if asked == "off" else DuplicateFamilies(asked)


def _parse_url(url: str) -> tuple[str, int, str]:
    """Host, port and path. An IPv6 address may stand without its brackets: Kubernetes gives a node's as it is."""
    match = _URL.fullmatch(url)
    if match is None or not 0 < int(match[3]) < 65536:
        raise CratonError(f"--node-exporter {url!r} is no address: give off, or a URL such as {NODE_EXPORTER_URL}")
    return match[1] or match[2], int(match[3]), match[4] or "/metrics"


def _fetch(host: str, port: int, path: str) -> bytes:
    """The body, ValueError where it is too large or too slow. HTTP 1.0 ends it with the connection, so that one
    deadline holds for every byte; http.client has a limit for each read alone."""
    deadline = time.monotonic() + ANSWER_SECONDS
    answer = bytearray()
    with socket.create_connection((host, port), ANSWER_SECONDS) as connection:
        connection.sendall(f"GET {path} HTTP/1.0\r\nHost: {host}:{port}\r\n\r\n".encode())
        while len(answer) <= MAX_ANSWER_BYTES and (left := deadline - time.monotonic()) > 0:
            connection.settimeout(left)
            chunk = connection.recv(_CHUNK_BYTES)
            if not chunk:
                break
            answer += chunk
        else:
            excess = "takes more time than" if len(answer) <= MAX_ANSWER_BYTES else "is larger than"
            raise ValueError(f"its answer {excess} {ANSWER_SECONDS:g} s and {MAX_ANSWER_BYTES:,} bytes allow")
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    if not _HTTP_OK.match(head):
        raise ValueError(f"it answers {head.splitlines()[0][:80]!r}" if head else "it answers nothing")
    return body
