"""The page beside a real Prometheus and a server's metrics; verdicts, schedulers and deeds beside it."""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser import Browser
from page_server import PageServer
from simulated_runs import write_run
from test_web_readers import metrics_of
from waiting import PATIENCE_SECONDS, wait_until

from craton.agent.processes import free_port
from craton.observability.exporter.gpus.cards import Card, CardProcess
from craton.observability.web import TopView
from craton.observability.web import actions as actions_module
from craton.observability.web.actions import act, healed
from craton.observability.web.charts import RESULT_CHARTS
from craton.observability.web.http import serve as serve_module
from craton.observability.web.run_page import RunPage
from craton.observability.web.sources import (
    Answered,
    Background,
    CachedVerdict,
    LocalGpus,
    Prometheus,
    Schedulers,
    Verdicts,
    caches,
)
from craton.observability.web.sources import queries as queries_module
from craton.observability.web.sources import verdicts as verdicts_module
from craton.orchestration import Standing
from craton.telemetry import RunDirectory
from craton.telemetry.node import Heartbeat, write_heartbeat

Serve = Callable[..., PageServer]


class MetricsServer:
    """Answers every request with the same text."""

    def __init__(self, text: str) -> None:
        served = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = served.text.encode()
                self.send_response(200)
                self.send_header("content-type", "text/plain; version=0.0.4")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *values: object) -> None:  # noqa: A002 - the name it has there
                pass

        self.text = text
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def metrics() -> Iterator[Callable[[str], MetricsServer]]:
    servers: list[MetricsServer] = []

    def start(text: str) -> MetricsServer:
        servers.append(MetricsServer(text))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def exporter(metrics: Callable[[str], MetricsServer]) -> MetricsServer:
    """The GPUs of two nodes."""
    gpus = "".join(
        f'DCGM_FI_DEV_GPU_TEMP{{node="node-{node}",gpu="{gpu}"}} {60 + 10 * node + gpu}\n'
        for node in (0, 1)
        for gpu in (0, 1)
    )
    return metrics("# TYPE DCGM_FI_DEV_GPU_TEMP gauge\n" + gpus)


@pytest.fixture
def prometheus(tmp_path: Path, exporter: MetricsServer) -> Iterator[str]:
    """A real one, with an alert that fires for node-1."""
    rule = {
        "alert": "GpuHot",
        "expr": 'max by (node) (DCGM_FI_DEV_GPU_TEMP{node="node-1"}) > 65',
        "labels": {"severity": "page", "layer": "device"},
        "annotations": {"summary": "<b>hot</b> {{ $labels.node }}", "action": "look at its fans"},
    }
    (tmp_path / "rules.json").write_text(json.dumps({"groups": [{"name": "test", "rules": [rule]}]}))
    config = {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms", "scrape_timeout": "500ms"},
        "rule_files": [str(tmp_path / "rules.json")],
        "scrape_configs": [{"job_name": "gpus", "static_configs": [{"targets": [f"127.0.0.1:{exporter.port}"]}]}],
    }
    (tmp_path / "prometheus.json").write_text(json.dumps(config))
    port = free_port()
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={tmp_path / 'prometheus.json'}",
            f"--storage.tsdb.path={tmp_path / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
        ]
    )
    address = f"http://127.0.0.1:{port}"

    def fires() -> bool:
        assert process.poll() is None
        return any(alert.state == "firing" for alert in Prometheus(address).alerts().alerts)

    try:
        wait_until(fires)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE_SECONDS)


def test_alerts_and_gpus_of_a_real_prometheus_are_on_the_page(
    serve: Serve, prometheus: str, exporter: MetricsServer, tmp_path: Path, browser: Browser
) -> None:
    write_run(tmp_path / "runs", "llama", nodes=2, ranks_per_node=2, steps=3)
    asked = Prometheus(prometheus)
    assert asked.gpus("llama", ["node-1"]) == {"node-1": {"DCGM_FI_DEV_GPU_TEMP": 71.0}}
    whose = "# TYPE craton_gpu_rank_memory_bytes gauge\n" + "".join(
        f'craton_gpu_rank_memory_bytes{{node="node-1",gpu="{gpu}",run="{run}",run_node="a",rank="{rank}"}} 1e9\n'
        for gpu, run, rank in ((0, "llama", 0), (0, "llama", 1), (1, r"other\"", 0))
    )
    exporter.text += whose
    wait_until(lambda: asked.gpus("llama", ["a", "node-1"]) == {"a": {"DCGM_FI_DEV_GPU_TEMP": 70.0}})
    assert asked.gpus('other"', ["a"]) == {"a": {"DCGM_FI_DEV_GPU_TEMP": 71.0}}
    assert asked.gpus("none", ["a"]) == {}
    assert asked.alerts().of_run("llama", ["node-0"]) == []
    tab = browser.open(f"{serve(prometheus=prometheus).address}runs/llama")
    tab.wait_for("document.querySelector('[data-fragment=alerts]').textContent.includes('<b>hot</b> node-1')")
    tab.wait_for(
        "document.querySelector('[data-fragment=nodes]').textContent.includes('Prometheus has an alert for it')"
    )
    assert "look at its fans" in tab.evaluate("document.querySelector('[data-fragment=alerts]').textContent")
    assert tab.errors == []
    tab.close()


def test_a_server_has_its_price_and_where_it_can_be_asked(tmp_path: Path) -> None:
    run = write_run(tmp_path, "served", nodes=1, ranks_per_node=1, steps=3)
    launch = json.loads(run.launch_path.read_text())
    run.plan_path.write_text(json.dumps({"kind": "serve", "dollars_per_hour": 10.0}))
    run.launch_path.write_text(json.dumps({**launch, "dollars_per_day": 240.0}))
    run.job_path.write_text(
        "name: served\nkind: serve\nmodel: llama-3.1-8b\nserve: {initialize: random}\ncluster: local\n"
    )
    write_heartbeat(run, "node-0", Heartbeat(0, "running", 1, 0, "10.1.2.3:7000", "far-node"))
    page = RunPage(run, Verdicts(lambda run: CachedVerdict("healthy", "")), Answered, None, Schedulers())
    head = page.parts["head"].get().fragments
    assert 'data-dollars="$240"' in head["state"]
    assert "$240 per day" in head["tiles"]
    assert "Its server listens only on 127.0.0.1 of far-node" in page.parts["serving"].get().fragments["serving"]


def test_what_a_command_does_not_tell_of_is_not_shown(serve: Serve, tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs", "count", nodes=1, ranks_per_node=1, steps=0)
    run.plan_path.unlink()  # what is not planned is a command
    page = RunPage(run, Verdicts(lambda run: CachedVerdict("healthy", "")), Answered, None, Schedulers())
    fragments = {name for part in page.parts.values() for name in part.get().fragments}
    assert not {"phases", "ranks", "checkpoints"} & fragments
    assert "Loss" not in page.parts["head"].get().fragments["tiles"]
    write_run(tmp_path / "runs", "llama", nodes=1, ranks_per_node=1, steps=0)
    server = serve()
    text = server.ask("GET", "/runs/count")[2]
    # Sections for members, training, own metrics, a step, ranks and checkpoints, the four charts of training, what only
    # post-training has: two sections and its charts, and what only a suite has: a section and its chart.
    posttraining, suite = 2 + len(RESULT_CHARTS), 2
    assert text.count("data-optional hidden") == text.count("data-optional") == 10 + posttraining + suite
    of_llama = server.ask("GET", "/runs/llama")[2]
    assert of_llama.count("data-optional") == 2 + posttraining + suite  # two: of members and own metrics


def test_a_prometheus_that_does_not_answer_is_told_and_hides_nothing(serve: Serve, tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "llama", nodes=1, steps=3)
    page = serve(prometheus=f"http://127.0.0.1:{free_port()}")
    wait_until(lambda: "does not answer" in page.ask("GET", "/runs/llama")[2])
    assert "3 / 400" in page.ask("GET", "/runs/llama")[2]


def test_a_prometheus_that_hangs_or_is_none_keeps_no_page_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path, "llama", nodes=1, steps=3)
    monkeypatch.setattr(queries_module, "ANSWER_SECONDS", 86400.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        asked = Prometheus(f"http://127.0.0.1:{silent.getsockname()[1]}")
        alerts = Background(asked.alerts, 5.0, asked.late, 0.3)
        page = RunPage(run, Verdicts(lambda run: CachedVerdict("healthy", "")), alerts.get, asked, Schedulers())
        shown = page.parts["nodes"].get()
        assert "has not answered yet" in shown.fragments["alerts"]
        with closing(
            TopView(run, asked.url, examine=lambda run, prometheus: CachedVerdict("unsure", str(prometheus)))
        ) as top:
            assert "has not answered yet" in top.look().trouble
            wait_until(lambda: top.look().verdict)
            assert getattr(top.look().verdict, "sentence", "") == asked.url  # `why` asks the same server
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            accepted, _ = other.accept()
            with accepted:
                accepted.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        threading.Thread(target=answer, daemon=True).start()
        assert "does not answer" in Prometheus(f"http://127.0.0.1:{other.getsockname()[1]}").alerts().trouble


def test_trouble_with_a_part_is_told_until_it_is_over(serve: Serve, tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs", "llama", nodes=1, steps=3)
    kept = run.generation_path(0).read_text()
    run.generation_path(0).write_text(json.dumps({**json.loads(kept), "ranks_per_node": "many"}))
    page = serve()
    told = "The part “nodes” of this page cannot be shown"
    wait_until(lambda: told in page.ask("GET", "/runs/llama")[2])
    assert "3 / 400" in page.ask("GET", "/runs/llama")[2]
    run.generation_path(0).write_text(kept)
    wait_until(lambda: told not in page.ask("GET", "/runs/llama")[2])


def test_a_value_that_comes_late_is_told_of_and_heard_of_when_it_comes() -> None:
    may_answer = threading.Event()
    answers = itertools.chain(["first"], itertools.repeat("second"))

    def make() -> str:
        may_answer.wait(PATIENCE_SECONDS)
        return next(answers)

    value = Background(make, 0.05, "late", 0.1)
    assert value.get(0.0) == "late"
    may_answer.set()
    wait_until(lambda: value.get() == "first")
    may_answer.clear()
    wait_until(lambda: value.get() == "late")  # it had answered before, and hangs now
    may_answer.set()
    wait_until(lambda: value.get() == "second")


def test_a_server_is_shown_with_its_latencies(
    serve: Serve, metrics: Callable[[str], MetricsServer], tmp_path: Path, browser: Browser
) -> None:
    run = write_run(tmp_path / "runs", "chat", nodes=1, ranks_per_node=1, steps=1)
    server = metrics(metrics_of(100, "0.5", waiting=7))
    serving = f"serve: {{port: {server.port}, initialize: random}}"
    run.job_path.write_text(f"name: chat\nkind: serve\nmodel: qwen3-0.6b\n{serving}\ncluster: local x 1\n")
    run.plan_path.write_text(json.dumps({"kind": "serve"}))
    tab = browser.open(f"{serve().address}runs/chat")
    tab.wait_for("document.querySelector('[data-fragment=serving]').textContent.includes('7 waiting')")
    text = tab.evaluate("document.querySelector('[data-fragment=serving]').textContent")
    assert "300 ms" not in text  # nobody has asked since somebody looks
    assert "25%" in text
    server.text = metrics_of(160, "0.5", waiting=9)
    tab.wait_for("document.querySelector('[data-fragment=serving]').textContent.includes('9 waiting')")
    text = tab.evaluate("document.querySelector('[data-fragment=serving]').textContent")
    assert "300 ms" in text  # the middle of the bucket from 0.1 to 0.5 s
    tab.wait_for("document.querySelectorAll('canvas[data-drawn]').length >= 6")
    assert tab.errors == []
    tab.close()


def test_a_verdict_is_made_once_for_a_state_and_a_failed_examination_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path, "llama", nodes=1, steps=3)
    examined: list[str] = []

    def examine(run: RunDirectory) -> CachedVerdict:
        examined.append(run.name)
        if len(examined) == 1:
            raise RuntimeError("a torn file\nand more")
        return CachedVerdict("healthy", "fine")

    verdicts = Verdicts(examine)
    assert verdicts.ask(run, 1) is None
    wait_until(lambda: verdicts.ask(run, 1) is not None)
    answer = verdicts.ask(run, 1)
    assert answer is not None
    assert (answer.condition, answer.sentence) == ("unknown", "diagnosis failed: a torn file")
    other = write_run(tmp_path, "other", nodes=1, steps=3)
    wait_until(lambda: verdicts.ask(other, 1) is not None)
    assert examined == ["llama", "other"]  # nothing changed: it was not asked twice
    verdicts.close()


def test_a_run_that_hangs_is_examined_again_although_it_looks_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdicts_module, "FRESH_SECONDS", 0.05)
    counts: dict[str, int] = {}

    def examine(run: RunDirectory) -> CachedVerdict:
        counts[run.name] = counts.get(run.name, 0) + 1
        return CachedVerdict("healthy" if counts[run.name] == 1 else "hung", "")

    verdicts = Verdicts(examine)
    hung, ended = RunDirectory(tmp_path / "hung"), RunDirectory(tmp_path / "ended")

    def condition() -> str:
        verdicts.ask(ended, "failed")
        answer = verdicts.ask(hung, ("running", 100), is_moving=True)
        return answer.condition if answer else ""

    wait_until(lambda: condition() == "hung" and counts["hung"] >= 4)
    assert counts["ended"] == 1
    verdicts.close()


def test_the_verdict_on_a_failed_run_is_not_shown_after_it_was_started_again(tmp_path: Path) -> None:
    goes_on = threading.Event()
    conditions = iter(("dead", "starting"))

    def examine(run: RunDirectory) -> CachedVerdict:
        condition = next(conditions)
        if condition == "starting":
            assert goes_on.wait(PATIENCE_SECONDS)
        return CachedVerdict(condition, "")

    verdicts, run = Verdicts(examine), RunDirectory(tmp_path / "llama")
    wait_until(lambda: verdicts.ask(run, "failed") is not None)
    assert verdicts.ask(run, "starting", is_moving=True) is None
    assert verdicts.known(run) is None
    goes_on.set()  # it is examined at once, although the last verdict is fresh
    wait_until(lambda: verdicts.ask(run, "starting", is_moving=True) == CachedVerdict("starting", ""))
    verdicts.close()


def test_every_run_gets_its_turn_and_those_being_looked_at_more_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdicts_module, "FRESH_SECONDS", 0.0)
    monkeypatch.setattr(verdicts_module, "REST_SHARE", 0.0)
    order: list[str] = []
    runs = [RunDirectory(tmp_path / f"run-{number:02}") for number in range(12)]
    all_asked = threading.Event()

    def examine(run: RunDirectory) -> CachedVerdict:
        assert all_asked.wait(PATIENCE_SECONDS)
        order.append(run.name)
        time.sleep(0.002)
        return CachedVerdict("healthy", "")

    verdicts = Verdicts(examine)

    def ask() -> bool:
        for run in runs:
            verdicts.ask(run, len(order), is_moving=True, urgent=run is runs[7])
        all_asked.set()
        return len(order) >= 120

    wait_until(ask)
    verdicts.close()
    looked_at = order.count("run-07")
    assert 40 <= looked_at <= 70 * len(order) / 120
    assert {run.name for run in runs} <= set(order[:26])  # each has an answer before any has several, but that one
    others = [order.count(run.name) for run in runs if run is not runs[7]]
    assert max(others) - min(others) <= 1


def test_a_run_nobody_asks_about_any_more_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = Verdicts(lambda run: CachedVerdict("healthy", ""))
    old, new = RunDirectory(tmp_path / "old"), RunDirectory(tmp_path / "new")
    wait_until(lambda: verdicts.ask(old, 1) is not None)
    monkeypatch.setattr(verdicts_module, "FORGET_SECONDS", 0.05)
    wait_until(lambda: verdicts.ask(new, 1) is not None and "old" not in verdicts._wanted)
    verdicts.close()


def test_a_change_outlives_who_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path, "llama", nodes=1, steps=3)
    monkeypatch.setattr(actions_module, "ANSWER_SECONDS", 0.5)
    script = (
        "import os, sys, time, pathlib; here = pathlib.Path(sys.argv[-1])\n"
        "(here / 'session').write_text(str(os.getsid(0) == os.getpid()))\n"
        "while not (here / 'go').exists(): time.sleep(0.01)\n"
        "print('still heard'); sys.stdout.flush(); (here / 'finished').touch()"
    )
    command = (sys.executable, "-c", f"import sys; sys.argv.append({str(tmp_path)!r})\n{script}")
    told = act("kill", run, craton=command)
    assert not told.is_done
    assert "continues" in told.message
    (tmp_path / "go").touch()
    wait_until((tmp_path / "finished").exists)
    assert (tmp_path / "session").read_text() == "True"


def test_a_browser_is_not_given_the_token_on_its_command_line() -> None:
    link = "http://127.0.0.1:8080/#token=abc&d"
    with serve_module._openable(link, is_secret=True) as opened:
        assert "token" not in opened
        path = Path(opened.removeprefix("file://"))
        assert path.stat().st_mode & 0o777 == 0o600
        assert "url=http://127.0.0.1:8080/#token=abc&amp;d" in path.read_text()
    assert not path.exists()
    with serve_module._openable("http://127.0.0.1:8080/", is_secret=False) as opened:
        assert opened == "http://127.0.0.1:8080/"


def test_a_verb_that_fails_tells_its_own_words(tmp_path: Path) -> None:
    run = write_run(tmp_path, "llama", nodes=1, steps=3, state="done")
    stopped = act("stop", run)
    assert (stopped.is_done, stopped.message) == (False, "llama is already done: there is nothing to stop")
    script = "import json, sys; print(json.dumps({'error': ' '.join(sys.argv[1:])})); sys.exit(2)"
    told = act("resume", run, craton=(sys.executable, "-c", script))
    assert (told.is_done, told.message) == (False, f"resume {run.path} --detach --yes --json")


TAKEN = {"node": "n1", "action": "reset", "reason": "XID 95", "deed": "take_out", "why_not": ""}
HELD = {
    "node": "n2",
    "action": "reboot",
    "reason": "XID 79",
    "deed": "none",
    "why_not": "1 of 10 nodes are out already",
}


@pytest.mark.parametrize(
    ("healing", "is_done", "words"),
    [
        ({"mode": "advise", "decisions": []}, True, "no node needs an action"),
        (
            {"mode": "advise", "decisions": [{"node": "n1", "action": "reset", "reason": "XID 95"}]},
            True,
            "n1 needs reset: XID 95. No action was taken: its cluster's policy is advise",
        ),
        (
            {"mode": "act", "decisions": [HELD]},
            False,
            "n2 needs reboot: XID 79 (not done: 1 of 10 nodes are out already). No action was taken",
        ),
        (
            {"mode": "act", "decisions": [TAKEN], "deeds": [{"id": "4f2a91c0"}, {"id": "4f2a91c0"}]},
            True,
            "1 done, undo with `craton heal llama --undo 4f2a91c0`; n1 needs reset: XID 95",
        ),
        ({"mode": "act", "decisions": [], "failures": ["sinfo does not answer"]}, False, "sinfo does not answer"),
        (
            {"mode": "act", "decisions": [TAKEN], "deeds": [{"id": "ab"}], "failures": ["llama stays on node-1"]},
            False,
            "1 done, undo with `craton heal llama --undo ab`; llama stays on node-1; n1 needs reset: XID 95",
        ),
        ({"mode": "off", "decisions": []}, False, "healing is off for its cluster"),
    ],
)
def test_what_heal_found_and_did_is_told(healing: dict[str, object], is_done: bool, words: str) -> None:
    told = healed(healing, "llama")
    assert told.is_done == is_done
    assert told.message.startswith(words)


def test_the_words_of_heal_are_read_whatever_its_exit_code_is(tmp_path: Path) -> None:
    script = f"import sys; print({json.dumps(json.dumps({'mode': 'act', 'decisions': [HELD]}))}); sys.exit(1)"
    told = act("heal", RunDirectory(tmp_path / "llama"), craton=(sys.executable, "-c", script))
    assert "n2 needs reboot" in told.message


def test_heal_is_really_asked(tmp_path: Path) -> None:
    run = write_run(tmp_path, "llama", nodes=1, steps=3)
    told = act("heal", run)
    assert told.is_done, told.message
    assert "node" in told.message


class StandInCards:
    """Two cards, one of which is hot."""

    def list(self) -> list[Card]:
        return [Card(number, f"GPU-{number}", f"00000000:5{number}:00.0", "NVIDIA H200", number) for number in (0, 1)]

    def read(self, card: Card) -> dict[str, float]:
        return {
            "utilization.gpu": 90.0 - card.index,
            "temperature.gpu": 60.0 + 25 * card.index,
            "power.usage": 650_000.0,
        }

    def processes(self, card: Card) -> list[CardProcess]:
        return []

    def xids(self) -> list[tuple[Card, int]]:
        return []

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("cards", "hottest"), [({}, [85.0]), ({"node-0": "GPU-0", "node-1": "1"}, [60.0, 85.0])])
def test_gpus_of_this_machine_are_those_of_their_nodes(
    tmp_path: Path, cards: dict[str, str], hottest: list[float]
) -> None:
    run = write_run(tmp_path, "llama", nodes=2, ranks_per_node=1, steps=3)
    launch = json.loads(run.launch_path.read_text())
    run.launch_path.write_text(json.dumps({**launch, "gpus": True, "cards": cards}))
    found = LocalGpus(run, StandInCards).look()
    assert [found[node]["DCGM_FI_DEV_GPU_TEMP"] for node in sorted(found)] == hottest
    assert found["node-0"]["DCGM_FI_DEV_POWER_USAGE"] == 650.0


def test_gpus_that_cannot_be_asked_are_told_of_and_a_run_without_any_is_not(tmp_path: Path) -> None:
    def fail() -> StandInCards:
        raise RuntimeError("driver not loaded")

    run = write_run(tmp_path, "llama", nodes=1, steps=3)
    without = LocalGpus(run, fail)
    assert (without.look(), without.trouble) == ({}, "")
    run.launch_path.write_text(json.dumps({**json.loads(run.launch_path.read_text()), "gpus": True}))
    broken = LocalGpus(run, fail)
    assert (broken.look(), broken.trouble) == ({}, "cannot read the GPUs of this machine: driver not loaded")


def test_a_scheduler_is_asked_once_for_the_list_and_all_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moment = 100.0
    monkeypatch.setattr(caches.time, "monotonic", lambda: moment)
    runs = [RunDirectory.create(tmp_path, name) for name in ("a", "b", "c")]
    asked: list[list[str]] = []

    def ask(wanted: Iterable[RunDirectory]) -> dict[str, Standing]:
        asked.append([run.name for run in wanted])
        return {name: Standing("waiting", sentence=f"question {len(asked)}") for name in asked[-1]}

    shared = Schedulers(ask)
    assert set(shared.standings(runs[:2])) == {"a", "b"}
    assert shared.standings(runs[:1])["a"].sentence == "question 1"  # a page of its own
    assert set(shared.standings(runs)) == {"a", "b", "c"}
    moment += caches.FRESH_SECONDS + 1
    assert shared.standings(runs[1:2])["b"].sentence == "question 3"
    assert asked == [["a", "b"], ["c"], ["b"]]
