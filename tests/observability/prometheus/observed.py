"""A run whose agent is this test, a receiver of alerts, and whether real Prometheus and Alertmanager are there."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from craton.telemetry import RunDirectory
from craton.telemetry.node import Heartbeat, MetricsEndpoint, process_start, write_heartbeat


def need(*names: str) -> None:
    """Skips where none of the names is a program."""
    if not any(shutil.which(name) for name in names):
        pytest.skip(f"{names[0]} is not installed: `make observers` installs it where it may")


class LiveRun:
    """A run that goes on, as a reader of its directory sees it; its nodes serve real endpoints from this process."""

    def __init__(self, root: Path, name: str, nodes: tuple[str, ...] = ("n0", "n1")) -> None:
        self.run = RunDirectory.create(root, name)
        self.run.launch_path.write_text(
            json.dumps({"generation": 0, "nodes": list(nodes), "num_nodes": len(nodes), "leaves": {nodes[0]: "leaf1"}})
        )
        self.endpoints: dict[str, MetricsEndpoint] = {}
        self.ports: dict[str, int] = {}
        for rank, node in enumerate(nodes):
            endpoint = MetricsEndpoint(name, node, "leaf1" if rank == 0 else "")
            self.ports[node] = endpoint.serve(0, "127.0.0.1")
            endpoint.update({"run_step": 5, "run_progress_age_seconds": 0.5, "run_step_seconds": 0.1}, rank)
            self.endpoints[node] = endpoint
            self.beat(node, "running")
        self.endpoints[nodes[0]].update({"run_loss": 2.5}, 0)

    def beat(self, node: str, state: Any, age_seconds: float = 0.0, generation: int = 0) -> None:
        pid = os.getpid()
        port = self.ports[node]
        beat = Heartbeat(generation, state, pid, port, "127.0.0.1:1", socket.gethostname(), process_start(pid))
        write_heartbeat(self.run, node, beat)
        moment = time.time() - age_seconds
        os.utime(self.run.heartbeat_path(node), (moment, moment))

    def end(self, state: Any = "done") -> None:
        for node in self.endpoints:
            self.beat(node, state)
        self.run.mark("DONE")
        self.close()

    def close(self) -> None:
        """Together: each takes up to half a second, for the server looks no more often whether it should end."""
        closing = [threading.Thread(target=endpoint.close) for endpoint in self.endpoints.values()]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()


class Served:
    """A text at /metrics, and whatever is posted anywhere."""

    def __init__(self) -> None:
        self.text = ""
        self.posted: list[dict[str, Any]] = []
        served = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(served.text.encode())

            def do_POST(self) -> None:
                served.posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self._answer(b"")

            def _answer(self, body: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
