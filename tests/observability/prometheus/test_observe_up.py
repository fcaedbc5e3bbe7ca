"""`craton observe up` with real Prometheus and Alertmanager: a fault reaches a webhook, and ends with its run."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from observed import LiveRun, Served, need
from waiting import PATIENCE_SECONDS, wait_until

from craton.job.cluster import load_cluster
from craton.observability.prometheus import Observer, ObserverSettings, processes
from craton.observability.prometheus import observer as observer_module
from craton.observability.prometheus.errors import ObserveError
from craton.observability.prometheus.observer import data_folder
from craton.observability.prometheus.scrape import MANAGED_BY, RUN, kubernetes_jobs
from craton.observability.prometheus.targets import SearchedExporters

pytestmark = pytest.mark.usefixtures("programs")
DCGM = """\
# HELP DCGM_FI_DEV_GPU_TEMP t
# TYPE DCGM_FI_DEV_GPU_TEMP gauge
DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="u0",Hostname="g1",hpc_job="812",modelName="H100"} 40
DCGM_FI_DEV_GPU_TEMP{gpu="1",UUID="u1",Hostname="g1",hpc_job="",modelName="H100"} 41
DCGM_FI_DEV_GPU_TEMP{gpu="2",UUID="u2",Hostname="g1",pod="llama-node-0-3-x7k2p",modelName="H100"} 41
DCGM_EXP_XID_ERRORS_COUNT{gpu="0",UUID="u0",Hostname="g1",hpc_job="812",xid="79",window_size_in_ms="300000"} %d
"""


@pytest.mark.slow
def test_a_fault_reaches_the_webhook_with_what_to_do(
    live_run: LiveRun, served: Served, exporter: Served, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that does not move and a card that falls off the bus, both through scraping, rules and Alertmanager."""
    monkeypatch.setenv("CRATON_RUNS", str(live_run.run.path.parent))
    exporter.text = DCGM % 0
    (live_run.run.path / "backend.json").write_text(json.dumps({"on": "slurm", "job": "812"}))
    runbooks = "https://wiki.example.com/"
    settings = ObserverSettings(port=port, every_seconds=0.5, webhook=f"{served.url}alerts", runbooks=runbooks)
    observer = Observer(settings)
    observer.keeper.exporters = SearchedExporters({"dcgm": exporter.port})
    with observer:
        wait_until(lambda: _healths(observer) == {"up"} and len(observer.look().targets) == 3)
        assert observer.look().firing == [], "nothing is wrong yet"
        assert served.posted == []
        config = observer.data / "alertmanager.yml"
        assert config.stat().st_mode & 0o777 == 0o600, "whoever reads the webhook's address may write to it"
        live_run.endpoints["n0"].update({"run_progress_age_seconds": 700.0, "run_progress_limit_seconds": 600.0}, 0)
        exporter.text = DCGM % 1
        wait_until(lambda: {"RunHung", "GpuXidReboot"} <= set(_posted(served)))
        hang = _posted(served)["RunHung"]
        assert hang["status"] == "firing"
        assert (hang["labels"]["run"], hang["labels"]["node"], hang["labels"]["leaf"]) == ("alpha", "n0", "leaf1")
        assert (hang["labels"]["severity"], hang["labels"]["layer"]) == ("page", "framework")
        assert hang["annotations"]["runbook_url"] == "https://wiki.example.com/framework.md#runhung"
        card = _posted(served)["GpuXidReboot"]
        assert card["annotations"]["summary"] == f"XID 79 on {os.uname().nodename} GPU 0: drain and reboot the node"
        assert card["labels"]["action"] == "reboot"
        assert "run" not in card["labels"], "the event stays the card's when the job on it ends"
        assert observer.prometheus is not None
        own = observer.prometheus.ask("/api/v1/query", query='up{job="prometheus"}')["data"]["result"]
        assert [each["value"][1] for each in own] == ["1"], "it sees whether its own rules fail"
        assert (observer.data / "prometheus/wal").is_dir()
        shared = {path.name for path in observer.folder.iterdir()}
        assert shared == {"lock", "rules", "targets"}, "no database on a file system of the network"
        found = observer.prometheus.ask("/api/v1/query", query="DCGM_FI_DEV_GPU_TEMP")["data"]["result"]
        assert {each["metric"]["gpu"]: each["metric"].get("run", "") for each in found} == {
            "0": "alpha",
            "1": "",
            "2": "llama",
        }
        live_run.end()
        observer.refresh()
        wait_until(lambda: "RunHung" not in {alert["name"] for alert in observer.look().alerts})
        wait_until(lambda: "craton" not in {target["job"] for target in observer.look().targets})
    assert not observer.services[0].is_running
    assert not observer.services[1].is_running


def test_what_kubernetes_and_the_files_both_find_is_scraped_once(
    live_run: LiveRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """promtool says what becomes of the pods. Debian's is built without discovery in Kubernetes: they are told here."""
    need("promtool")
    first, second = (f"127.0.0.1:{live_run.ports[node]}" for node in ("n0", "n1"))
    told = {MANAGED_BY: "craton", "__meta_kubernetes_pod_container_port_name": "metrics"}
    runs = {first: "alpha", second: "alpha", "10.0.0.7:9400": "elsewhere"}  # the last of another folder of runs
    pods = [{"targets": [address], "labels": {**told, RUN: run}} for address, run in runs.items()]

    def told_here(*arguments: Any) -> list[dict[str, Any]]:
        agents = next(job for job in kubernetes_jobs(*arguments) if job["job_name"] == "craton")
        assert agents.pop("kubernetes_sd_configs")
        return [{**agents, "static_configs": pods}]

    started = SimpleNamespace(reload=lambda: reloads.append(True), end=lambda: None, is_running=True)
    reloads: list[bool] = []
    monkeypatch.setattr(observer_module, "kubernetes_jobs", told_here)
    monkeypatch.setattr(observer_module, "start_prometheus", lambda *_: started)
    monkeypatch.setattr(observer_module, "rule_groups", lambda *_, **__: [])
    cluster = load_cluster(Path(__file__).parents[3] / "examples/clusters/eks-p5en.yaml")
    observer = Observer(ObserverSettings(runs=(live_run.run,), cluster=cluster, alertmanager=False))
    observer.keeper.exporters = SearchedExporters({})
    config = observer.data / "prometheus.yml"

    def scraped_as_pods() -> set[str]:
        words = ["promtool", "check", "service-discovery", "--timeout=100ms", str(config), "craton-pods"]
        found = json.loads(subprocess.run(words, check=True, capture_output=True).stdout)
        return {each["labels"]["instance"] for each in found if each["labels"]}

    with observer:
        assert {target.address for target in observer.keeper.targets} == {first, second}
        subprocess.run(["promtool", "check", "config", "--syntax-only", str(config)], check=True, capture_output=True)
        wait_until(lambda: scraped_as_pods() == {"10.0.0.7:9400"})
        observer.refresh()
        assert reloads == [], "nothing is other than before"
        live_run.beat("n1", "released")
        observer.refresh()
        wait_until(lambda: scraped_as_pods() == {second, "10.0.0.7:9400"})
        assert reloads == [True]


@pytest.mark.slow
def test_a_node_that_dies_is_told_of(live_run: LiveRun, served: Served, port: int) -> None:
    """NodeDown must hold for 30 s; here it is seen to be pending at once, with the labels of the node."""
    settings = ObserverSettings(runs=(live_run.run,), port=port, every_seconds=0.5, alertmanager=False)
    with Observer(settings) as observer:
        wait_until(lambda: _healths(observer) == {"up"})
        live_run.endpoints["n1"].close()
        live_run.beat("n1", "running", age_seconds=60)
        observer.refresh()
        wait_until(lambda: any(alert["name"] == "NodeDown" for alert in observer.look().alerts))
        (alert,) = (alert for alert in observer.look().alerts if alert["name"] == "NodeDown")
        assert (alert["state"], alert["labels"]["node"], alert["labels"]["run"]) == ("pending", "n1", "alpha")
        assert {target["node"]: target["health"] for target in observer.look().targets} == {"n0": "up", "n1": "down"}


def test_the_verb_on_a_live_run_then_on_a_finished_one(live_run: LiveRun, tmp_path: Path, port: int) -> None:
    environment = {**os.environ, "CRATON_RUNS": str(live_run.run.path.parent)}
    data = tmp_path / "metrics"
    options = [f"--port={port}", "--every=1s", f"--data={data}", "--json"]
    command = [sys.executable, "-m", "craton", "observe", "up", "alpha", *options]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        started = json.loads(process.stdout.readline())
        assert (started["event"], started["prometheus"]) == ("started", f"http://127.0.0.1:{port}")
        assert started["alertmanager"] == f"http://127.0.0.1:{port + 3}"
        assert (started["data"], (data / "prometheus").is_dir()) == (str(data), True)
        listening = {
            (connection.laddr.ip, connection.laddr.port)
            for child in psutil.Process(process.pid).children()
            for connection in child.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        assert listening == {("127.0.0.1", port), ("127.0.0.1", port + 3)}, "loopback alone"
        children = psutil.Process(process.pid).children()
        while not any(target["health"] == "up" for target in json.loads(process.stdout.readline())["targets"]):
            pass
        again = subprocess.run(
            [*command, "--for=1s"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        assert again.returncode == 2
        assert "another `craton observe up`" in json.loads(again.stdout)["error"]
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read().decode()
        assert json.loads(rest.splitlines()[-1])["event"] == "ended"
        assert process.wait(PATIENCE_SECONDS) == 0
    assert not any(child.is_running() for child in children)
    live_run.end()
    done = subprocess.run(
        [*command[:-1], "--for=1s"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "alpha is not running" in done.stdout
    assert f"prometheus http://127.0.0.1:{port}" in done.stdout


@pytest.mark.slow
def test_what_was_recorded_is_there_after_the_run(live_run: LiveRun, port: int) -> None:
    settings = ObserverSettings(runs=(live_run.run,), port=port, every_seconds=0.5, alertmanager=False)
    with Observer(settings) as observer:
        wait_until(lambda: _healths(observer) == {"up"})
    live_run.end()
    with Observer(settings) as observer:
        assert observer.prometheus is not None
        query = {"query": "last_over_time(craton_run_step[1h])"}
        found = observer.prometheus.ask("/api/v1/query", **query)["data"]["result"]
        assert {each["metric"]["rank"] for each in found} == {"0", "1"}
        assert observer.look().targets == ()


def test_both_programs_end_when_craton_is_killed(live_run: LiveRun, port: int) -> None:
    environment = {**os.environ, "CRATON_RUNS": str(live_run.run.path.parent)}
    command = [sys.executable, "-m", "craton", "observe", "up", f"--port={port}", "--json"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.readline()
        children = psutil.Process(process.pid).children()
        assert len(children) == 2
        process.kill()
    wait_until(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children))


def test_metrics_are_kept_on_this_machine_apart_for_each_folder_of_runs(tmp_path: Path) -> None:
    first, second = data_folder(tmp_path / "a/runs"), data_folder(tmp_path / "b/runs")
    assert first != second
    assert first.is_relative_to(tmp_path / "state/craton"), "$XDG_STATE_HOME"
    assert data_folder(tmp_path / "a/../a/runs") == first


def test_a_folder_for_metrics_that_cannot_be_made_is_said(live_run: LiveRun, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = ObserverSettings(runs=(live_run.run,), alertmanager=False, data=tmp_path / "file/metrics")
    with pytest.raises(ObserveError, match="--data"), Observer(settings):
        pass


def test_a_port_that_is_taken_is_said_before_anything_runs(live_run: LiveRun, served: Served) -> None:
    settings = ObserverSettings(runs=(live_run.run,), port=served.port, alertmanager=False)
    with pytest.raises(ObserveError, match=f"{served.port}.*--port"), Observer(settings):
        pass


def test_an_address_of_ipv6_is_listened_on(port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both take it in brackets, as URLs and targets have it; a bad address is not blamed on the port."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    processes.check_port("::1", port, "prometheus")
    started: list[list[str]] = []
    monkeypatch.setattr(processes, "_start", lambda name, command, *_: started.append(command))
    processes.start_prometheus(tmp_path, "::1", port)
    processes.start_alertmanager(tmp_path, "::1", port)
    for command in started:
        assert f"--web.listen-address=[::1]:{port}" in command
    assert processes.ObserverProcess("prometheus", "::1", port, None, tmp_path).url == f"http://[::1]:{port}"  # type: ignore[arg-type]
    with pytest.raises(ObserveError, match=r"\[2001:db8::1\].*--listen"):
        processes.check_port("2001:db8::1", port, "prometheus")


def test_programs_that_are_missing_are_said_with_how_to_get_them(
    live_run: LiveRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes.shutil, "which", lambda *_, **__: None)
    with pytest.raises(ObserveError, match="apt-get install prometheus"):
        Observer(ObserverSettings(runs=(live_run.run,)))


def test_a_file_system_without_locks_is_not_taken_for_another_observer(
    live_run: LiveRun, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from craton.observability.prometheus import observer

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(observer.fcntl, "flock", refuse)
    settings = ObserverSettings(runs=(live_run.run,), port=port, alertmanager=False)
    with pytest.raises(ObserveError, match="No locks available"), Observer(settings):
        pass


def test_a_webhook_needs_alertmanager(live_run: LiveRun) -> None:
    with pytest.raises(ObserveError, match="--no-alertmanager"):
        Observer(ObserverSettings(runs=(live_run.run,), alertmanager=False, webhook="http://127.0.0.1:1/"))


def _healths(observer: Observer) -> set[str]:
    return {target["health"] for target in observer.look().targets}


def _posted(served: Served) -> dict[str, dict[str, dict[str, str]]]:
    return {alert["labels"]["alertname"]: alert for each in list(served.posted) for alert in each["alerts"]}
