"""Families that a node_exporter on this node already exports, so that Craton's exporter omits them.

It is polled in the background, because it may start or stop at any time. A scrape uses the last answer and never waits.
Only names in its actual scrape count; when it does not answer, Craton's exporter exports everything.
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
MAX_ANSWER_BYTES = 8 << 20  # a node with 192 CPUs and 32 NICs has less than 1 MiB
_CHUNK_BYTES = 64 << 10
_URL = re.compile(r"http://(?:\[([^\]/]+)\]|([^/]+)):(\d{1,5})(/\S*)?")
_SAMPLE = re.compile(rb"^([A-Za-z_]\w*)[{ ]", re.MULTILINE)
_HTTP_OK = re.compile(rb"HTTP/1\.[01] 200\b")
_OURS = "craton_exporter_info"


class DuplicateFamilies:
    """`names` are the families of the exporter at `url` at the last poll; empty when none answers."""

    def __init__(self, url: str = NODE_EXPORTER_URL, ask_seconds: float = ASK_SECONDS) -> None:
        self.url = url
        self.names: frozenset[str] = frozenset()
        self._address = _parse_url(url)
        self._ask_seconds = ask_seconds
        self._said = ""
        self._asked, self._ended = threading.Event(), threading.Event()
        # A daemon thread: name resolution may block it beyond the end of the process.
        self._thread = threading.Thread(target=self._ask_forever, name="node_exporter", daemon=True)
        self._thread.start()

    def wait_first(self) -> None:
        """Return after the first poll, or after ANSWER_SECONDS."""
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
            return frozenset()  # no node_exporter here: normal, nothing to report
        except (OSError, ValueError) as error:
            self._say(f"cannot read {self.url}, exporting all families: {type(error).__name__}: {error}")
            return frozenset()
        if _OURS in names:  # perhaps itself: two of ours that omit each other's families would export nothing
            self._say(f"{self.url} is a Craton exporter, not a node_exporter; exporting all families")
            return frozenset()
        return frozenset(name for name in names if name.startswith("node_") and name in FAMILIES)

    def _say(self, problem: str) -> None:
        """Print a problem once on stderr: most problems persist from poll to poll."""
        if problem != self._said:
            print(problem, file=sys.stderr, flush=True)
            self._said = problem


def find_duplicates(asked: str) -> DuplicateFamilies | None:
    """Start polling the node_exporter at the URL `asked`; None for `off`. CratonError when it is neither."""
    return None if asked == "off" else DuplicateFamilies(asked)


def _parse_url(url: str) -> tuple[str, int, str]:
    """Return host, port and path. An IPv6 address may lack its brackets: Kubernetes gives a node's without."""
    match = _URL.fullmatch(url)
    if match is None or not 0 < int(match[3]) < 65536:
        raise CratonError(f"--node-exporter {url!r} is not valid: give off, or a URL such as {NODE_EXPORTER_URL}")
    return match[1] or match[2], int(match[3]), match[4] or "/metrics"


def _fetch(host: str, port: int, path: str) -> bytes:
    """Return the body; ValueError when it is too large or too slow. HTTP 1.0 ends it with the connection, so one
    deadline covers all bytes; http.client only has a timeout per read."""
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
            too_slow = len(answer) <= MAX_ANSWER_BYTES
            limit = f"takes longer than {ANSWER_SECONDS:g} s" if too_slow else f"exceeds {MAX_ANSWER_BYTES:,} bytes"
            raise ValueError(f"the response {limit}")
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    if not _HTTP_OK.match(head):
        raise ValueError(f"the response is {head.splitlines()[0][:80]!r}" if head else "the response is empty")
    return body
