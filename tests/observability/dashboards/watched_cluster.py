"""Real Prometheus on a small cluster that moves: a run of two nodes and a server, whose endpoints are the product's,
this machine's exporter, and two simulated nodes (a P5en with EFA, Lustre and stand-in GPUs, one with InfiniBand).
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from infrastructure.node_images import Node
from observability.exporter.exporting import exporting
from observability.exporter.stand_in_nvml import StandInNvml, eight_cards
from observability.exporter.trees import full_node, kernel_files, smart_page

from craton.ml.serving.messages import STEP_BOUNDS, OutputDelta, Ready, Stats
from craton.ml.serving.server.metrics import Metrics
from craton.observability.exporter import ExporterServer, NodeExporter
from craton.observability.prometheus import Observer, ObserverSettings, rules
from craton.observability.prometheus.processes import ObserverProcess
from craton.observability.prometheus.targets import ScrapedMachine, ScrapeTarget, SearchedExporters
from craton.telemetry import METRICS, RunDirectory
from craton.telemetry.node import (
    Heartbeat,
    MetricsEndpoint,
    NodeStatus,
    RankStatus,
    process_start,
    write_heartbeat,
    write_status,
)

EVERY_SECONDS = 1.0
RUN, SERVER = "alpha", "chat"
HERE = socket.gethostname()
P5EN, LAB = "ip-10-0-0-7", "lab-3"
LEAVES = {HERE: "leaf-1", P5EN: "leaf-1", LAB: "leaf-2"}
RANK_PID = 4242  # on the P5en
_COUNTED = re.compile(r"(?<=\s)\d+(?=\s|$)")


class WatchedRun:
    """A run of two nodes, n0 on this machine and n1 on the P5en, that tells of every metric there is."""

    def __init__(self, root: Path) -> None:
        self.run = RunDirectory.create(root, RUN)
        self.run.launch_path.write_text('{"generation": 0, "nodes": ["n0", "n1"], "num_nodes": 2}')
        self.endpoints = {"n0": MetricsEndpoint(RUN, "n0", "leaf-1"), "n1": MetricsEndpoint(RUN, "n1", "leaf-1")}
        for rank, (node, host) in enumerate((("n0", HERE), ("n1", P5EN))):
            port = self.endpoints[node].serve(0, "127.0.0.1")
            pid = os.getpid()
            beat = Heartbeat(0, "running", pid, port, "127.0.0.1:1", host, process_start(pid))
            write_heartbeat(self.run, node, beat)
            status = RankStatus(rank, RANK_PID + rank, "productive", (), 5, 0.1, 0.2, False)
            write_status(self.run, NodeStatus(time.time(), 0, node, (status,)))
        self.step = 0

    def move(self) -> None:
        """One step, told as agents tell it: plans by the node, what the whole run measures by rank 0."""
        self.step += 1
        first = self.endpoints["n0"]
        for name, metric in METRICS.items():
            value = self.step * (1 + 0.1 * len(name))
            if name == "run_ledger_seconds":
                for rank, endpoint in enumerate(self.endpoints.values()):
                    endpoint.book({"productive": 0.4, "checkpoint": 0.1}, rank)
            elif metric.label:
                first.set_labelled(name, {"peer": time.time() if "moment" in name else value})
            elif metric.scope == "rank" and name.startswith("run_"):
                for rank, endpoint in enumerate(self.endpoints.values()):
                    endpoint.update({name: value + rank}, rank)
            else:
                first.update({name: value}, None if name.startswith("plan_") or name == "run_restarts" else 0)

    def close(self) -> None:
        for endpoint in self.endpoints.values():
            endpoint.close()


class WatchedServer:
    """The metrics of a server whose engine is a report that changes."""

    def __init__(self) -> None:
        link: Any = SimpleNamespace(ready=Ready("tiny", 300, 64), stats=Stats(), exchanges=(), control_seconds=0.0)
        self.link, self.metrics, self.moves = link, Metrics(link, None), 0
        metrics = self.metrics

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = metrics.text()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def move(self) -> None:
        """A request is answered."""
        self.moves += 1
        count, now = self.moves, time.monotonic()
        self.link.stats = Stats(
            running=2, waiting=1, blocks_used=5, blocks=10, host_blocks_used=1, host_blocks=4, preemptions=count,
            prefix_queries=10 * count, prefix_hits=4 * count, host_hits=2 * count, drafts=count, drafted=4 * count,
            accepted=3 * count, steps=count, step_tokens=8 * count,
            steps_by_tokens=(count,) * (len(STEP_BOUNDS) + 1), step_seconds=0.02, plan_step_seconds=0.01,
            roofline=0.5, tokens_per_second=100.0, weights_version=1,
        )  # fmt: skip
        meter = self.metrics.meter(5, 1, 8)
        meter.note(OutputDelta(1, tokens=[1], cached_tokens=2, admitted=now), now + 0.1, None)
        meter.note(OutputDelta(1, tokens=[2], finish="stop"), now + 0.2, "stop")

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@dataclass
class SimulatedNode:
    """An image of a node whose counters count."""

    root: Path
    files: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        found = [path for path in self.root.rglob("*") if path.is_file() and not path.is_symlink()]
        names = ("proc/stat", "proc/diskstats", "proc/net/dev", "proc/net/snmp", "/stats")
        self.files = [
            path for path in found if str(path).endswith(names) or path.parent.name in ("counters", "hw_counters")
        ]
        assert self.files

    def move(self) -> None:
        for path in self.files:
            text = path.read_text()
            path.write_text(_COUNTED.sub(lambda match: str(int(match[0]) + 100), f" {text}")[1:])


@dataclass
class FixedExporters(SearchedExporters):
    """Exporters that are known, instead of those found by their ports."""

    known: list[ScrapeTarget] = field(default_factory=list)

    def look(self, machines: Iterable[ScrapedMachine]) -> list[ScrapeTarget]:
        return self.known


@dataclass
class Cluster:
    prometheus: ObserverProcess
    parts: list[WatchedRun | WatchedServer | SimulatedNode]

    def move(self) -> None:
        for part in self.parts:
            part.move()

    def ask(self, path: str, **parameters: str) -> Any:
        return self.prometheus.ask(path, **parameters)["data"]


@contextmanager
def watched_cluster(folder: Path, port: int) -> Iterator[Cluster]:
    runs = folder / "runs"
    run, server = WatchedRun(runs), WatchedServer()
    p5en, lab = simulated_p5en(folder / "p5en"), SimulatedNode(small(full_node("lab-h100")).write(folder / "lab"))
    with ExitStack() as stack:
        stack.callback(run.close)
        stack.callback(server.close)
        targets = [ScrapeTarget("craton-serve", f"127.0.0.1:{server.port}", {"run": SERVER, "node": "n0"})]
        cards = eight_cards()
        cards[0].processes = [(RANK_PID + 1, 5 << 30)]
        cards[1].set_field("GET_GPU_RECOVERY_ACTION", 1)
        nodes: dict[str, tuple[Path, StandInNvml | None]] = {
            HERE: (Path("/"), None),
            P5EN: (p5en.root, StandInNvml(cards)),
            LAB: (lab.root, None),
        }
        for name, (root, nvml) in nodes.items():
            options = {"mode": "off"} if nvml is None else {}
            exporter = stack.enter_context(
                exporting(root, nvml, node=name, leaf=LEAVES[name], runs_folder=runs, **options)
            )
            targets.append(ScrapeTarget("craton-node", _served(stack, exporter), {"node": name, "leaf": LEAVES[name]}))
        settings = ObserverSettings(
            runs=(run.run,), port=port, every_seconds=EVERY_SECONDS, alertmanager=False, data=folder / "metrics"
        )
        observer = Observer(settings)
        observer.keeper.exporters = FixedExporters(known=targets)
        with patch.object(rules, "SLOWLY", f"{EVERY_SECONDS:.0f}s"):  # nobody here waits for a minute
            stack.enter_context(observer)
        assert observer.prometheus is not None
        yield Cluster(observer.prometheus, [run, server, p5en, lab])


def simulated_p5en(folder: Path) -> SimulatedNode:
    root = small(full_node("p5en")).write(folder)
    (root / "commands/smart-nvme1.bin").write_bytes(smart_page(celsius=51, spare=90, used=12, media_errors=3))
    with (root / "commands/dmesg.txt").open("a") as log:
        log.write("[99990.000000] NVRM: Xid (PCI:0000:63:00): 79, GPU has fallen off the bus.\n")
    return SimulatedNode(root)


def small(node: Node) -> Node:
    """With few processors: hundreds of series each would say nothing more."""
    node.files |= kernel_files(4)
    return node


def _served(stack: ExitStack, exporter: NodeExporter) -> str:
    server = ExporterServer(exporter, "127.0.0.1", 0)
    stack.callback(server.close)
    return f"127.0.0.1:{server.port}"
