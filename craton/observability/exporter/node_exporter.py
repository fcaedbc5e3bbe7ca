"""The exporter of one node: its collectors, the scrape text, and the HTTP server."""

from __future__ import annotations

import gzip
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from craton.errors import CratonError
from craton.infrastructure.probes import NodeRoot
from craton.limits import explain, raise_file_limit
from craton.observability.exporter.collector import Collector, Team
from craton.observability.exporter.drives import DriveCollector
from craton.observability.exporter.duplicates import DuplicateFamilies
from craton.observability.exporter.exposition import CONTENT_TYPE, Page, Sample
from craton.observability.exporter.fabric import FabricCollector
from craton.observability.exporter.filesystem import FilesystemCollector
from craton.observability.exporter.gpus import (
    CardLabels,
    Cards,
    CardSource,
    GpuCollector,
    Occupants,
    RecordedCards,
    XidCollector,
)
from craton.observability.exporter.host import HostCollector, host_name
from craton.observability.exporter.lustre import LustreCollector
from craton.observability.exporter.runs_here import RunsCollector, RunsHere
from craton.telemetry import runs_root
from craton.version import VERSION

DEFAULT_PORT = 9500
GZIP_LEVEL = 1  # a tenth of the bytes for a few milliseconds; higher levels cost more CPU than they save


class NodeExporter:
    """Metrics of one node in Prometheus' format, without the families that `duplicates` found in another exporter.
    `open_cards` opens the GPU driver; None: no GPU metrics."""

    def __init__(
        self,
        root: NodeRoot,
        *,
        node: str = "",
        leaf: str = "",
        runs_folder: Path | None = None,
        open_cards: Callable[[], Cards] | None = None,
        more: Sequence[Collector] = (),
        duplicates: DuplicateFamilies | None = None,
    ) -> None:
        host = host_name(root)
        self.node = node or host
        source, labels = CardSource(open_cards), CardLabels(host)
        here = RunsHere(runs_folder or runs_root(), host)
        self._xids = XidCollector(root, source, labels)
        self._team = Team(
            [
                GpuCollector(root, source, labels, Occupants(root, here)),
                self._xids,
                RunsCollector(here),
                FabricCollector(root),
                LustreCollector(root),
                DriveCollector(root),
                HostCollector(root),
                FilesystemCollector(root),
                *more,
            ]
        )
        self._page = Page(self.node, leaf)
        self._duplicates = duplicates
        self._lock = threading.Lock()  # concurrent scrapes wait: collectors have state
        self._scrape_seconds = 0.0

    def scrape(self) -> str:
        with self._lock:
            began = time.perf_counter()
            own: list[Sample] = [
                ("craton_exporter_info", (VERSION,), 1),
                ("craton_exporter_scrape_seconds", (), self._scrape_seconds),
            ]
            now = time.time()
            collected = list(self._team.collect(now))
            samples = [*collected, *self._xids.wishes(collected, now), *own]
            if self._duplicates is not None and (left_out := self._duplicates.names):
                samples = [sample for sample in samples if sample[0] not in left_out]
            text = self._page.text(samples)
            self._scrape_seconds = time.perf_counter() - began
            return text

    def close(self) -> None:
        self._team.close()
        if self._duplicates is not None:
            self._duplicates.close()


class ExporterServer:
    """Serve `http://ADDRESS:PORT/metrics` in the background; port 0 chooses a free one, colons mean IPv6."""

    def __init__(self, exporter: NodeExporter, address: str, port: int) -> None:
        raise_file_limit()
        handler = type("_Handler", (_Handler,), {"exporter": exporter})
        kind, host = (_ServerOfIpv6, f"[{address}]") if ":" in address else (ThreadingHTTPServer, address)
        try:
            self._server = kind((address, port), handler)
        except (OSError, OverflowError) as error:
            raise CratonError(f"cannot listen on {host}:{port} ({explain(error)}): change --port or --listen") from None
        self._server.daemon_threads = True
        self.port = int(self._server.server_port)
        self.url = f"http://{host}:{self.port}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, name="exporter", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _ServerOfIpv6(ThreadingHTTPServer):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    exporter: NodeExporter
    protocol_version = "HTTP/1.1"  # Prometheus reuses its connection
    timeout = 60.0

    def do_GET(self) -> None:
        if self.path.partition("?")[0] not in ("/metrics", "/"):
            self._answer(404, b"not found; metrics are at /metrics\n", "text/plain; charset=utf-8")
            return
        body = self.exporter.scrape().encode()
        # Over loopback, compression would cost more than collecting the metrics.
        packed = "gzip" in self.headers.get("Accept-Encoding", "") and not self._is_local()
        self._answer(200, gzip.compress(body, GZIP_LEVEL) if packed else body, CONTENT_TYPE, packed=packed)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name that http.server gives it
        """Do not log requests: there is one every few seconds."""

    def _is_local(self) -> bool:
        return ipaddress.ip_address(self.client_address[0].partition("%")[0]).is_loopback

    def _answer(self, status: int, body: bytes, kind: str, *, packed: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if packed:
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        self.wfile.write(body)


def cards_of(root: NodeRoot, nvml: str) -> Callable[[], Cards] | None:
    """Return how to open the GPUs: NVML on a live node, the recorded nvidia-smi of an image; None for `off`."""
    if nvml not in ("auto", "off"):
        raise CratonError(f"--nvml {nvml!r} is not valid: give auto or off")
    if nvml == "off":
        return None
    if root.is_recorded:
        return lambda: RecordedCards(root)
    from craton.observability.exporter.gpus import NvmlCards

    return NvmlCards
