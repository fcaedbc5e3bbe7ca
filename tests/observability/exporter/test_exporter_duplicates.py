"""Beside a node_exporter. The server here is a stand-in: it serves a few families in the text format of node_exporter,
which itself has not been run beside ours."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from shutil import rmtree

import pytest
from observability.exporter.exporting import Scrape, exporting, scrape
from observability.exporter.trees import write_root
from waiting import PATIENCE_SECONDS, wait_until

from craton.errors import CratonError
from craton.observability.exporter import ExporterServer, duplicates
from craton.observability.exporter.duplicates import DuplicateFamilies, find_duplicates

NODE_EXPORTER_TEXT = """\
# HELP go_goroutines Number of goroutines that currently exist.
# TYPE go_goroutines gauge
go_goroutines 8
# HELP node_cpu_seconds_total Seconds the CPUs spent in each mode.
# TYPE node_cpu_seconds_total counter
node_cpu_seconds_total{cpu="0",mode="idle"} 1.54e+06
# HELP node_exporter_build_info A metric with a constant '1' value labeled by version.
# TYPE node_exporter_build_info gauge
node_exporter_build_info{branch="HEAD",goarch="amd64",goos="linux",version="1.9.1"} 1
# HELP node_load1 1m load average.
# TYPE node_load1 gauge
node_load1 0.5
# HELP node_load5 5m load average.
# TYPE node_load5 gauge
"""


class StandIn:
    """`answer` is what a GET gets: status and body."""

    def __init__(self) -> None:
        self.answer = (200, NODE_EXPORTER_TEXT.encode())
        self.held = threading.Event()  # answers wait for it
        self.held.set()
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                stand_in.held.wait(PATIENCE_SECONDS)
                status, body = stand_in.answer
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name that http.server gives it
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/metrics"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.held.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def other() -> Iterator[StandIn]:
    stand_in = StandIn()
    yield stand_in
    stand_in.close()


def asked(url: str, ask_seconds: float = 0.02) -> DuplicateFamilies:
    found = DuplicateFamilies(url, ask_seconds)
    assert found._asked.wait(PATIENCE_SECONDS)
    return found


def test_what_its_scrape_contains_is_left_out_and_nothing_else(other: StandIn, tmp_path: Path) -> None:
    root = write_root(tmp_path, "cpu")
    with exporting(root) as alone, exporting(root, duplicates=asked(other.url)) as beside:
        everything, rest = scrape(alone).names(), scrape(beside).names()
    assert everything - rest == {"node_cpu_seconds_total", "node_load1"}
    assert rest <= everything
    assert "node_load5" in rest, "a name without a sample is not served there"


def test_it_may_come_and_go(other: StandIn, tmp_path: Path) -> None:
    root = write_root(tmp_path, "cpu")
    other.answer = (503, b"")
    with exporting(root, duplicates=asked(other.url)) as exporter:
        assert "node_load1" in scrape(exporter).names()
        other.answer = (200, NODE_EXPORTER_TEXT.encode())
        wait_until(lambda: "node_load1" not in scrape(exporter).names())
        other.close()
        wait_until(lambda: "node_load1" in scrape(exporter).names())


def test_a_scrape_does_not_wait_for_it(other: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "ANSWER_SECONDS", PATIENCE_SECONDS)
    other.held.clear()
    found = DuplicateFamilies(other.url)
    with exporting(write_root(tmp_path, "cpu"), duplicates=found) as exporter:
        assert "node_load1" in scrape(exporter).names(), "and it is served meanwhile"
        assert not found._asked.is_set()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((500, NODE_EXPORTER_TEXT.encode()), "the response is b'HTTP/1.0 500 Internal Server Error'"),
        ((200, NODE_EXPORTER_TEXT.encode() + b"#" * 4096), "exceeds 4,096 bytes"),
        ((200, NODE_EXPORTER_TEXT.encode() + b'craton_exporter_info{version="1"} 1\n'), "is a Craton exporter"),
    ],
)
def test_an_answer_that_cannot_be_used_is_named_once(
    other: StandIn,
    answer: tuple[int, bytes],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(duplicates, "MAX_ANSWER_BYTES", 4096)
    other.answer = answer
    found = asked(other.url, ask_seconds=60.0)
    assert found.names == frozenset()
    assert found._ask() == frozenset(), "asked a second time"
    found.close()
    said = capfd.readouterr().err
    assert said.count(message) == 1, said
    assert "exporting all families" in said


def test_an_answer_that_never_ends_is_given_up(
    other: StandIn, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(duplicates, "ANSWER_SECONDS", 0.05)
    other.held.clear()
    found = asked(other.url, ask_seconds=60.0)
    found.close()
    assert found.names == frozenset()
    assert "exporting all families: TimeoutError" in capfd.readouterr().err


def test_where_none_runs_nothing_is_said(other: StandIn, capfd: pytest.CaptureFixture[str]) -> None:
    other.close()
    found = asked(other.url)
    found.close()
    assert (found.names, capfd.readouterr().err) == (frozenset(), "")


def test_ours_at_its_address_leaves_nothing_out(tmp_path: Path) -> None:
    root = write_root(tmp_path, "cpu")
    with exporting(root) as first:
        server = ExporterServer(first, "127.0.0.1", 0)
        with exporting(root, duplicates=asked(server.url)) as second:
            assert "node_load1" in scrape(second).names()
        server.close()


@pytest.mark.parametrize("url", ["", "on", "127.0.0.1:9100", "https://here:9100", "http://here:0/", "http://:9100x/"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(CratonError, match=r"is not valid: give off, or a URL such as http://127\.0\.0\.1:9100/metrics"):
        find_duplicates(url)


def test_addresses() -> None:
    assert find_duplicates("off") is None
    parse = duplicates._parse_url
    assert parse("http://[::1]:9100/metrics") == parse("http://::1:9100/metrics") == ("::1", 9100, "/metrics")
    assert parse("http://node-7:9100") == ("node-7", 9100, "/metrics")


def test_the_verb_says_what_it_leaves_out(other: StandIn, tmp_path: Path) -> None:
    root = write_root(tmp_path / "node", "cpu")
    command = [sys.executable, "-m", "craton", "observe", "node", "--root", str(root), "--port", "0", "--name", "g1"]
    command += ["--node-exporter", other.url]
    assert json.loads(_first_line([*command, "--json"]))["left_out"] == [], "what runs here is not of an image"
    rmtree(root / "commands")  # it makes an image of what else is a node's root, mounted here
    assert json.loads(_first_line([*command, "--json"]))["left_out"] == ["node_cpu_seconds_total", "node_load1"]
    said = _first_line(command)
    assert said.startswith("metrics of g1 at http://127.0.0.1:")
    assert said.endswith(f", without 2 metric families that {other.url} serves\n")
    once = subprocess.run([*command, "--once"], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True)
    assert {"node_load1", "node_load5"} & Scrape(once.stdout).names() == {"node_load5"}


def _first_line(command: list[str]) -> str:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        return process.stdout.readline()
    finally:
        process.kill()
        process.wait()
