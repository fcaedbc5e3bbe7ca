"""What a Prometheus knows goes into a snapshot; what it does not know, or says wrong, changes nothing."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from craton.observability.diagnosis import diagnose
from craton.observability.diagnosis.building import healthy, slowed, slowed_all, with_node, without_hardware
from craton.observability.diagnosis.prometheus_queries import ask_prometheus, queries
from craton.observability.diagnosis.snapshot import FabricDevice, Gpu, Host, Mount
from craton.observability.exporter import FAMILIES, ONLY_DCGM

Row = tuple[dict[str, str], float]


@contextmanager
def prometheus(answers: dict[str, list[Row]]) -> Iterator[str]:
    """A server that answers queries which begin so; everything else is empty."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            (query,) = parse_qs(urlsplit(self.path).query)["query"]
            rows = next((rows for words, rows in answers.items() if query.startswith(words)), [])
            found: list[Any] = [{"metric": labels, "value": [1.0, str(value)]} for labels, value in rows]
            body = json.dumps({"status": "success", "data": {"resultType": "vector", "result": found}}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_a_throttled_card_is_found_from_afar() -> None:
    blind = without_hardware(slowed(healthy(4), {11: 1.4}))
    clocks = [
        ({"node": f"node-{node}", "gpu": str(gpu)}, 1200.0 if (node, gpu) == (1, 3) else 1900.0)
        for node in range(4)
        for gpu in range(8)
    ]
    held = [({"Hostname": "node-1", "gpu": "3", "reason": "hw_thermal_slowdown"}, 1.0)]
    with prometheus({"avg_over_time(DCGM_FI_DEV_SM_CLOCK": clocks, "craton_gpu_clocks_held": held}) as address:
        seen, note = ask_prometheus(blind, address)
    assert note == ""
    assert diagnose(blind).cause == "cannot_tell"
    verdict = diagnose(seen)
    assert (verdict.cause, verdict.node, verdict.rank) == ("gpu_throttled", "node-1", 11)


def test_counters_of_network_cards_and_hosts() -> None:
    blind = without_hardware(slowed_all(healthy(4), 3.0, "communication"))
    again = [({"instance": "node-2:9109", "device": "rdmap0s0"}, 0.02)]
    load = [({"nodename": "node-2.cluster.local"}, 7.5), ({"node": "another"}, 1.0)]
    with prometheus({"rate(node_amazonefa_retrans_bytes": again, "node_load1": load}) as address:
        seen, _ = ask_prometheus(blind, address)
    node = seen.node("node-2")
    assert node is not None
    assert node.host is not None
    assert (node.fabric[0].retransmitted_share, node.host.load) == (0.02, 7.5)
    assert (diagnose(seen).cause, diagnose(seen).node) == ("retransmissions", "node-2")


def test_file_systems_errors_and_flags() -> None:
    blind = without_hardware(healthy(2))
    where = {"node": "node-0", "mountpoint": "/fsx", "fstype": "lustre"}
    answers: dict[str, list[Row]] = {
        "1 - node_filesystem_avail": [(where, 0.99), ({**where, "mountpoint": "/run", "fstype": "tmpfs"}, 1.0)],
        "node_filesystem_readonly": [(where, 1.0)],
        "rate(craton_lustre_request_seconds_total[5m])": [
            ({"node": "node-0", "target": "fsx-OST0001"}, 0.004),
            ({"node": "node-0", "target": "fsx-OST0002"}, 0.4),
        ],
        "craton_gpu_xid_moment_seconds": [({"node": "node-0", "gpu": "1", "xid": "79"}, 1.8e9)],
        "DCGM_FI_DEV_ROW_REMAP_FAILURE": [({"node": "node-0", "gpu": "1"}, 1.0)],
        "craton_gpu_nvlink_links": [({"node": "node-0", "gpu": "1"}, 18.0)],
    }
    with prometheus(answers) as address:
        seen, _ = ask_prometheus(blind, address)
    (mount,) = seen.nodes[0].mounts
    assert (mount.path, mount.full_share, mount.is_read_only, mount.operation_seconds) == ("/fsx", 0.99, True, 0.4)
    (gpu,) = seen.nodes[0].gpus
    assert (gpu.xids[0].code, gpu.xids[0].moment, gpu.remap_failed, gpu.nvlinks) == (79, 1.8e9, True, 18)


def test_what_the_node_itself_said_stays() -> None:
    with prometheus({"node_load1": [({"node": "node-0"}, 999.0)]}) as address:
        seen, _ = ask_prometheus(with_node(healthy(2), "node-0", host=Host(load=3.0)), address)
    assert seen.nodes[0].host == Host(load=3.0)


def test_a_prometheus_that_knows_nothing_of_the_run() -> None:
    with prometheus({"node_load1": [({"node": "elsewhere"}, 1.0)]}) as address:
        seen, note = ask_prometheus(healthy(2), address)
    assert seen == healthy(2)
    assert "knows none of the nodes" in note


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "file:///etc/passwd", "nonsense"])
def test_one_that_cannot_be_asked_is_a_note(address: str) -> None:
    seen, note = ask_prometheus(healthy(2), address)
    assert seen == healthy(2)
    assert note.startswith(f"Prometheus at {address} could not be asked")


def test_what_is_asked_for_is_what_exporters_serve() -> None:
    served = {family if isinstance(family, str) else family.name for family in FAMILIES} | set(ONLY_DCGM)
    for query in queries():
        for name in re.findall(r"\b(?:DCGM_|node_|lustre_|craton_)\w+", query.expression):
            assert name in served, f"{query.field} asks for {name}"


def test_answers_have_a_place() -> None:
    places = {"gpu": Gpu, "fabric": FabricDevice, "host": Host, "filesystem": Mount, "lustre": Mount}
    for query in queries():
        assert query.field in places[query.of].__dataclass_fields__, query
