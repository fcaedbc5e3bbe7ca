"""The exporter as a process: scrapes over HTTP, parts that fail or hang, files that hold anything, and its verb."""

from __future__ import annotations

import gzip
import http.client
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from observability.exporter.exporting import Scrape, exporting, scrape
from observability.exporter.stand_in_nvml import StandInNvml, eight_cards
from observability.exporter.trees import write_root
from waiting import PATIENCE_SECONDS, wait_until

from craton.errors import CratonError
from craton.infrastructure.probes import NodeRoot
from craton.observability.exporter import ExporterServer, NodeExporter, cards_of, fsx_bridge
from craton.observability.exporter.collector import Collector, Team
from craton.observability.exporter.exposition import Sample

CRATON = [sys.executable, "-m", "craton"]


class Broken(Collector):
    name = "broken"

    def collect(self, now: float) -> Iterator[Sample]:
        yield "node_load1", (), 7
        raise RuntimeError("a driver that does what it likes")


class Stuck(Collector):
    name = "stuck"

    def __init__(self) -> None:
        self.back = threading.Event()
        self.calls = 0

    def collect(self, now: float) -> Iterator[Sample]:
        self.calls += 1
        self.back.wait(30.0)
        yield "node_load5", (), 5


def test_a_broken_part_is_counted_and_the_others_are_served(capfd: pytest.CaptureFixture[str]) -> None:
    team = Team([Broken(), Broken()])
    for _ in range(2):
        found = [(name, labels, value) for name, labels, value in team.collect(0.0)]
    team.close()
    assert ("craton_exporter_collector_errors_total", ("broken",), 2) in found
    assert ("node_load1", (), 7) in found, "what was read before it failed"
    assert capfd.readouterr().err.count("a driver that does what it likes") == 2, "each says it once"


def test_a_part_that_hangs_holds_the_first_scrape_and_no_other() -> None:
    stuck = Stuck()
    team = Team([stuck, Broken()], answer_seconds=0.4)
    list(team.collect(0.0))
    team._answer_seconds = 86400.0
    found = list(team.collect(0.0))
    assert ("craton_exporter_collector_stuck", ("stuck",), 1) in found
    assert ("node_load1", (), 7) in found, "the others are asked"
    stuck.back.set()
    team.close()


def test_a_part_that_hangs_is_left_behind_and_comes_back() -> None:
    stuck = Stuck()
    team = Team([stuck], answer_seconds=0.1)
    for _ in range(3):
        assert ("craton_exporter_collector_stuck", ("stuck",), 1) in list(team.collect(0.0))
    assert stuck.calls == 1
    stuck.back.set()
    found: list[object] = []

    def is_back() -> bool:
        found[:] = team.collect(0.0)
        return ("node_load5", (), 5) in found

    wait_until(is_back, "the part is back")
    assert ("craton_exporter_collector_stuck", ("stuck",), 0) in found
    team.close()


def test_files_that_hold_anything_never_end_it(tmp_path: Path) -> None:
    """Every file of a node in turn is empty, torn, binary, enormous or a folder; what can be read is served."""
    root = write_root(tmp_path)
    dice = random.Random(20261116)
    files = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    bad = [b"", b"\x00\xff\xfe" * 50, b"-1", b"NaN", b"9" * 400, b"cpu0 a b c\nTcp: x\nTcp: y\n", b": : :\n" * 40]
    nvml = StandInNvml(eight_cards())
    for round_number in range(4):
        for path in dice.sample(files, len(files) // 3):
            if path.is_file() and round_number == 3 and dice.random() < 0.2:
                path.unlink()
                path.mkdir()
            elif path.is_file():
                path.write_bytes(dice.choice(bad))
        with exporting(root, nvml) as exporter:
            for _ in range(2):
                found = scrape(exporter)
        assert found.value("craton_gpu_up", gpu="0") == 1
        assert found.value("craton_exporter_info") == 1


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ExporterServer]:
    exporter = NodeExporter(NodeRoot(write_root(tmp_path, "cpu")))
    server = ExporterServer(exporter, "0.0.0.0", 0)
    yield server
    server.close()
    exporter.close()


def test_http(served: ExporterServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE_SECONDS)
    for _ in range(2):  # over one connection, as Prometheus does
        connection.request("GET", "/metrics", headers={"Accept-Encoding": "gzip"})
        answer = connection.getresponse()
        text = answer.read().decode()
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert Scrape(text).value("node_load5") == 2.25
    connection.close()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{served.port}/nothing", timeout=PATIENCE_SECONDS)


def test_ipv6(tmp_path: Path) -> None:
    exporter = NodeExporter(NodeRoot(tmp_path))
    try:
        server = ExporterServer(exporter, "::1", 0)
    except CratonError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    assert server.url == f"http://[::1]:{server.port}/metrics"
    with urllib.request.urlopen(server.url, timeout=PATIENCE_SECONDS) as answer:
        assert Scrape(answer.read().decode()).value("craton_exporter_info") == 1
    server.close()
    exporter.close()


def test_what_leaves_the_machine_is_packed(served: ExporterServer) -> None:
    address = _own_address()
    request = urllib.request.Request(f"http://{address}:{served.port}/metrics", headers={"Accept-Encoding": "gzip"})
    with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
        assert answer.headers["Content-Encoding"] == "gzip"
        assert Scrape(gzip.decompress(answer.read()).decode()).value("node_load5") == 2.25


def test_scrapes_at_the_same_time(served: ExporterServer) -> None:
    texts: list[str] = []

    def ask() -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{served.port}/metrics", timeout=PATIENCE_SECONDS) as answer:
            texts.append(answer.read().decode())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert len(texts) == 8
    assert all(Scrape(text).value("node_load5") == 2.25 for text in texts)


def test_the_verb_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    root = write_root(tmp_path / "node")
    command = [*CRATON, "observe", "node", "--root", str(root), "--port", "0", "--leaf", "leaf-1", "--name", "g1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("metrics of g1 at http://127.0.0.1:")
        with urllib.request.urlopen(said.split()[-1], timeout=PATIENCE_SECONDS) as answer:
            found = Scrape(answer.read().decode())
        assert found.value("craton_gpus_seen", node="g1", leaf="leaf-1") == 8
        process.send_signal(signal.SIGTERM)
        assert process.wait(20.0) == 0
    finally:
        process.kill()
        process.wait()


def test_mistakes_say_what_to_do(tmp_path: Path) -> None:
    exporter = NodeExporter(NodeRoot(tmp_path))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(CratonError, match="change --port or --listen"):
            ExporterServer(exporter, "127.0.0.1", taken.getsockname()[1])
    with pytest.raises(CratonError, match="change --port or --listen"):
        ExporterServer(exporter, "127.0.0.1", 70_000)
    exporter.close()
    with pytest.raises(CratonError, match="give auto or off"):
        cards_of(NodeRoot(tmp_path), "maybe")
    with pytest.raises(CratonError, match="is not an FSx file system ID"):
        fsx_bridge("fs-x", NodeRoot(tmp_path))
    ended = subprocess.run(
        [*CRATON, "observe", "node", "--root", str(tmp_path / "nothing")],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert ended.returncode == 2
    assert "is not a folder" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_one_scrape_for_a_pipe(tmp_path: Path) -> None:
    root = write_root(tmp_path / "node")
    command = [*CRATON, "observe", "node", "--root", str(root), "--once", "--json"]
    said = json.loads(
        subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True).stdout
    )
    assert said["node"] == "ip-10-0-0-7"
    assert Scrape(said["metrics"]).value("craton_gpus_seen") == 8


def _own_address() -> str:
    """An address of this machine that is not loopback."""
    found = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    ]
    if not found:
        pytest.skip("this machine has loopback alone")
    return found[0]
