"""What a Prometheus knows goes into a snapshot; what it does not know, or says wrong, changes nothing."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from fake_snapshots import healthy, slowed, slowed_all, with_node, without_hardware

from craton.observability.diagnosis import diagnose
from craton.observability.diagnosis.collect import ask_prometheus, queries
from craton.observability.diagnosis.collect.prometheus import machines_of, of_machines
from craton.observability.diagnosis.snapshot import SnapshotFabricDevice, SnapshotGpu, SnapshotHost, SnapshotMount
from craton.observability.exporter import FAMILIES
from craton.observability.exporter.dcgm import ONLY_DCGM
from craton.observability.prometheus import find_program

Row = tuple[dict[str, str], float]


@contextmanager
def prometheus(answers: dict[str, list[Row]]) -> Iterator[str]:
    """A server that answers queries which begin so; everything else is empty."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            (query,) = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())["query"]
            query = re.sub(r"\{node[^}]*\}", "", query).removeprefix("(")
            rows = next((rows for words, rows in answers.items() if query.startswith(words)), [])
            found: list[Any] = [{"metric": labels, "value": [1.0, str(value)]} for labels, value in rows]
            body = json.dumps({"status": "success", "data": {"resultType": "vector", "result": found}}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 64  # a connection too many is tried again after a second

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
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
        seen, _ = ask_prometheus(with_node(healthy(2), "node-0", host=SnapshotHost(load=3.0)), address)
    assert seen.nodes[0].host == SnapshotHost(load=3.0)


def test_a_prometheus_that_knows_nothing_of_the_run() -> None:
    with prometheus({"node_load1": [({"node": "elsewhere"}, 1.0)]}) as address:
        seen, note = ask_prometheus(healthy(2), address)
    assert seen == healthy(2)
    assert "has no data on the nodes" in note


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "file:///etc/passwd", "nonsense"])
def test_one_that_cannot_be_asked_is_a_note(address: str) -> None:
    seen, note = ask_prometheus(healthy(2), address)
    assert seen == healthy(2)
    assert note.startswith(f"Prometheus at {address} could not be queried")


@pytest.mark.parametrize("field", ["throttle", "sm_clock_mhz", "load"])
def test_what_was_not_answered_stays_unknown(field: str) -> None:
    """Else a card that is held down would look well, and its rank's program be blamed."""
    machines = [(f"node-{node}", str(gpu)) for node in range(2) for gpu in range(8)]
    answers = {
        "sm_clock_mhz": [({"node": node, "gpu": gpu}, 1900.0) for node, gpu in machines],
        "load": [({"node": node}, 1.0) for node in ("node-0", "node-1")],
    }

    def ask(expression: str, slow: str) -> list[dict[str, Any]]:
        asked = next((query.field for query in queries() if query.expression == expression), "")
        if asked == slow:
            raise TimeoutError("timed out")
        return [{"metric": labels, "value": [0.0, str(value)]} for labels, value in answers.get(asked, [])]

    blind = without_hardware(slowed(healthy(2), {3: 1.4}))
    seen, note = ask_prometheus(blind, "http://p", lambda expression: ask(expression, "nothing"))
    assert (diagnose(seen).cause, note) == ("straggler", "")
    seen, note = ask_prometheus(blind, "http://p", lambda expression: ask(expression, field))
    assert note == f"Prometheus at http://p failed 1 of {len(queries()) + 1} queries: timed out"
    assert diagnose(seen).cause == "cannot_tell"


def test_only_machines_of_the_run_are_asked_for(tmp_path: Path) -> None:
    """By real promtool: those of its label node and those without one; and NVLinks that lack a counter still count."""
    machines = machines_of(replace(node, host_name="gpu-a.b") for node in healthy(1).nodes)
    nodes = ["node-0", "gpu-a", "gpu-a.c", "", "node-01", "a"]
    series = [
        {"series": f'DCGM_FI_DEV_NVLINK_{name}_ERROR_COUNT_TOTAL{{node="{node}",gpu="1"}}', "values": "0+60x10"}
        for node in nodes
        for name in ("CRC_DATA", "REPLAY")
    ]
    told = [f'{{gpu="1",node="{node}"}}' for node in nodes[:3]]
    samples = [{"labels": labels, "value": 2.0} for labels in (*told, '{gpu="1"}')]
    expected = [
        {
            "expr": of_machines(query.expression, machines),
            "eval_time": "10m",
            "exp_samples": samples if query.field == "nvlink_errors_per_second" else [],
        }
        for query in queries()
    ]
    case = {"interval": "1m", "input_series": series, "promql_expr_test": expected}
    (tmp_path / "test.yml").write_text(json.dumps({"tests": [case]}), encoding="utf-8")
    command = [find_program(("promtool",)), "test", "rules", str(tmp_path / "test.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_asked_for_is_what_exporters_serve() -> None:
    served = {family if isinstance(family, str) else family.name for family in FAMILIES} | set(ONLY_DCGM)
    for query in queries():
        for name in re.findall(r"\b(?:DCGM_|node_|lustre_|craton_)\w+", query.expression):
            assert name in served, f"{query.field} asks for {name}"


def test_answers_have_a_place() -> None:
    places = {
        "gpu": SnapshotGpu,
        "fabric": SnapshotFabricDevice,
        "host": SnapshotHost,
        "filesystem": SnapshotMount,
        "lustre": SnapshotMount,
    }
    for query in queries():
        assert query.field in places[query.of].__dataclass_fields__, query
