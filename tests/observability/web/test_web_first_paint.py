"""What the first answer holds before any script runs; own metrics; servers that stopped; causes; ticks of charts."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browser import Tab
from page_server import PageServer
from rich.console import Console
from simulated_runs import write_run
from waiting import PATIENCE_SECONDS, wait_until

from craton.observability.web import TopView, frame, frame_json
from craton.observability.web.http import application
from craton.observability.web.readers import History, RecordedLooks, joined, last_busy
from craton.observability.web.readers.history import MAX_OWN_METRICS
from craton.observability.web.run_page import RunPage, Shown
from craton.observability.web.sources import CachedVerdict, ServerLook, Verdicts, cause_first
from craton.telemetry import RunDirectory

Serve = Callable[..., PageServer]
BAD_COLOR = "rgb(192, 50, 31)"  # --bad in light


@pytest.fixture
def _waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page waits for its data however slow this machine is; the limit has a test of its own."""
    monkeypatch.setattr(application, "FIRST_SECONDS", 120.0)


def record(run: RunDirectory, lines: list[dict[str, Any]]) -> None:
    """As rank 0 of node-0, behind what it has recorded."""
    with open(run.metrics_path("node-0"), "a", encoding="utf-8") as file:
        for line in lines:
            stamped = {"generation": 0, **line, "node": "node-0", "rank": 0}
            file.write(json.dumps(stamped, separators=(",", ":")) + "\n")


def charts_of(body: str) -> dict[str, Any]:
    found = json.loads(body.partition('id="charts">')[2].partition("</script>")[0])
    assert isinstance(found, dict)
    return found


@pytest.mark.usefixtures("_waits")
def test_the_first_answer_has_the_data(serve: Serve, tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs", "llama", steps=40)
    record(run, [{"time": 1e9, "step": 40, "run_accuracy": 0.625}])
    body = serve().ask("GET", "/runs/llama")[2]
    assert "reading …" not in body
    assert "Not all of this run was read" not in body
    for words in ("40 / 400", "plan 41%", "checkpoint saved", "nvme", "2 nodes of 2 ranks", "productive"):
        assert words in body, words
    charts = charts_of(body)
    assert set(charts) == {"loss", "speed", "step", "gradient", "own run_accuracy", "heat", "topology"}
    assert len(charts["loss"]["x"]) == 40
    assert charts["loss"]["newest"].count("evaluation") == 1
    for name in ("loss", "speed", "step", "gradient", "own run_accuracy"):  # as text, for who runs no script
        assert f'<span class="newest">{charts[name]["newest"]}</span>' in body, name


@pytest.mark.usefixtures("_waits")
def test_what_a_command_does_not_record_is_not_being_read(serve: Serve, tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs", "count", nodes=1, ranks_per_node=1, steps=0)
    run.plan_path.unlink()  # what is not planned is a command
    record(run, [{"time": 1e9, "step": 1, "run_loss": 2.5, "run_step_seconds": 0.25}])
    body = serve().ask("GET", "/runs/count")[2]
    assert "reading …" not in body
    assert charts_of(body).keys() == {"loss", "step", "topology"}  # no phases, so no heat map of them


def test_a_part_that_takes_long_is_waited_for_within_a_limit_and_comes_later(
    serve: Serve, tmp_path: Path, tab: Tab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "FIRST_SECONDS", 0.2)
    is_read = threading.Event()
    show = RunPage._show_nodes

    def slow(page: RunPage) -> Shown:
        assert is_read.wait(PATIENCE_SECONDS)
        return show(page)

    monkeypatch.setattr(RunPage, "_show_nodes", slow)
    write_run(tmp_path / "runs", "llama", steps=20)
    page = serve()
    try:
        tab.go(f"{page.address}runs/llama")
        text = "document.querySelector('main').innerText"
        assert "Not all of this run was read" in tab.evaluate(text)
        assert "reading …" in tab.evaluate("document.querySelector('[data-fragment=nodes]').textContent")
        tab.wait_for("document.querySelector('canvas[data-chart=loss]').dataset.drawn")
    finally:
        is_read.set()
    tab.wait_for(f"{text}.includes('2 nodes of 2 ranks')")
    tab.wait_for(f"!{text}.includes('Not all of this run was read')")
    assert tab.evaluate("document.querySelectorAll('canvas[data-empty]').length") == 0


def test_a_metric_that_a_job_begins_to_record_gets_a_chart(
    serve: Serve, tmp_path: Path, tab: Tab, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "runs", "llama", steps=5)
    record(run, [{"time": 1e9, "step": step, "reward/mean": step / 10} for step in range(1, 6)])
    tab.go(f"{serve().address}runs/llama")
    drawn = "[...document.querySelectorAll('#own canvas[data-drawn]')].map((each) => each.dataset.chart)"
    tab.wait_for(f"{drawn}.length === 1")
    record(run, [{"time": 1e9, "step": 6, "reward/mean": 0.75, "bleu": 31.5}])
    tab.wait_for(f"{drawn}.length === 2")
    assert tab.evaluate(drawn) == ["own reward/mean", "own bleu"]
    captions = "[...document.querySelectorAll('#own figcaption')].map((each) => each.innerText.replace(/\\s+/g, ' '))"
    tab.wait_for(f"JSON.stringify({captions}) === JSON.stringify(['reward/mean 0.750', 'bleu 31.5'])")
    assert tab.evaluate("document.querySelector('#own').closest('section').hidden") is False


def test_own_metrics_are_those_outside_the_vocabulary_and_not_too_many(tmp_path: Path) -> None:
    run = write_run(tmp_path, "llama", steps=3)
    many = {f"own_{number}": number for number in range(MAX_OWN_METRICS + 5)}
    record(run, [{"time": 1e9, "step": 3, "run_mfu": 0.5, "text": "no number", "flag": True, **many}])
    curves = History(run).look()
    assert list(curves.own) == [f"own_{number}" for number in range(MAX_OWN_METRICS)]
    assert curves.num_hidden == 5
    assert curves.own["own_7"] == ([3], [7.0])


def test_a_metric_recorded_seldom_stays_in_a_long_curve(tmp_path: Path) -> None:
    run = write_run(tmp_path, "llama", nodes=1, ranks_per_node=1, steps=1)
    history = History(run)
    for begin in range(0, 6000, 2000):
        steps = range(begin + 2, begin + 2002)
        record(
            run, [{"time": 1e9, "step": at, "run_loss": 1.0, **({"bleu": at} if at % 500 == 0 else {})} for at in steps]
        )
        history.look()
    assert history.look().own["bleu"][0] == [500 * number for number in range(1, 13)]


def test_top_shows_the_loss_and_own_metrics(tmp_path: Path) -> None:
    run = write_run(tmp_path, "llama", nodes=1, steps=3)
    record(run, [{"time": 2e9, "step": 4, "run_loss": 1.25, "run_accuracy": 0.625, "reward/mean": 2}])
    view = TopView(run, examine=lambda run, prometheus: CachedVerdict("healthy", "all is well"))
    look = view.look(wait_for_verdict=True)
    told = frame_json(look)
    assert (told["loss"], told["own_metrics"]) == (1.25, {"run_accuracy": 0.625, "reward/mean": 2.0})
    console = Console(width=160, file=io.StringIO(), force_terminal=False)
    with console.capture() as captured:
        console.print(frame(look, 160, None, has_color=False))
    assert "loss 1.25 ·" in captured.get()
    assert "run_accuracy 0.625 · reward/mean 2" in captured.get()


TEXTS_OF_CHARTS = """
window.texts = [];
const original = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  const wide = this.measureText(text).width;
  const left = { center: x - wide / 2, right: x - wide }[this.textAlign] ?? x;
  window.texts.push([this.canvas.dataset.chart, text, left, left + wide, this.canvas.clientWidth]);
  return original.apply(this, arguments);
};"""


@pytest.mark.parametrize("width", [1400, 420])
def test_no_tick_of_a_chart_is_cut_off(serve: Serve, tmp_path: Path, tab: Tab, width: int) -> None:
    run = write_run(tmp_path / "runs", "llama", steps=2)
    record(run, [{"time": 1e9, "step": at, "run_loss": 9 / at, "own": 1e6 * at} for at in range(1, 101)])
    tab.resize(width, 900)
    tab.call("Page.addScriptToEvaluateOnNewDocument", source=TEXTS_OF_CHARTS)
    tab.go(f"{serve().address}runs/llama")
    tab.wait_for("document.querySelector('#own canvas[data-drawn]') && texts.some(([chart]) => chart === 'heat')")
    texts = tab.evaluate("window.texts")
    assert "100" in {text for chart, text, *_ in texts if chart == "loss"}  # the last step is a tick
    cut = [(chart, text) for chart, text, left, right, wide in texts if left < -0.5 or right > wide + 0.5]
    assert cut == []


def server_run(root: Path, name: str, state: str, lines: list[dict[str, Any]]) -> RunDirectory:
    """Of a server that has recorded these lines, one a second."""
    run = write_run(root, name, nodes=1, ranks_per_node=1, steps=0, state=state)
    run.job_path.write_text(
        f"name: {name}\nkind: serve\nmodel: qwen3-0.6b\nserve: {{port: 1, initialize: random}}\ncluster: local x 1\n"
    )
    run.plan_path.write_text(json.dumps({"kind": "serve"}))
    record(run, [{"time": 1e9 + number, "step": number + 1, **line} for number, line in enumerate(lines)])
    return run


def served(running: int, **more: float) -> dict[str, Any]:
    return {"serve_running": running, "serve_waiting": 0, "run_tokens_per_second": 100.0 * running, **more}


LATENCY = {"serve_first_token_seconds": 0.25, "serve_first_token_seconds_p95": 0.75, "serve_kv_share": 0.5}


@pytest.mark.usefixtures("_waits")
@pytest.mark.parametrize("state", ["stopped", "done", "failed", "lost"])
def test_a_server_that_is_gone_shows_its_last_measurements(serve: Serve, tmp_path: Path, state: str) -> None:
    server_run(tmp_path / "runs", "chat", state, [served(1), served(3, **LATENCY), served(2, **LATENCY)])
    body = serve().ask("GET", "/runs/chat")[2]
    charts = charts_of(body)
    assert charts["tokens"]["series"][0]["values"] == [100.0, 300.0, 200.0]
    assert charts["requests"]["series"][0]["values"] == [1, 3, 2]
    assert charts["first_token"]["series"][1]["values"] == [None, 0.75, 0.75]
    assert charts["kv"]["newest"] == "50%"
    assert charts["tokens"]["x_end"] == "last"
    assert "The server is not running. Last measurements" in body
    assert "250 ms" in body.partition('data-fragment="serving"')[2].partition("<figure")[0]


@pytest.mark.usefixtures("_waits")
def test_a_server_that_does_not_answer_or_never_computed_says_so(serve: Serve, tmp_path: Path) -> None:
    server_run(tmp_path / "runs", "silent", "running", [served(1), served(3)])
    server_run(tmp_path / "runs", "idle", "stopped", [])
    page = serve()
    body = page.ask("GET", "/runs/silent")[2]
    assert "No answer at http://127.0.0.1:1 yet." in body
    assert charts_of(body)["requests"]["series"][0]["values"] == [1, 3]
    assert "last step" not in body  # a server has none
    assert "The server is not running, and has recorded nothing." in page.ask("GET", "/runs/idle")[2]


def test_time_without_requests_is_shown_and_looks_go_on_from_records(tmp_path: Path) -> None:
    lines = [served(2), served(0), *({} for _ in range(8)), served(1)]
    looks = RecordedLooks(server_run(tmp_path, "chat", "stopped", lines)).read()
    assert [look.running for look in looks] == [2, 0, 1]
    curve = [(look.time - 1e9, look.tokens_per_second) for look in joined(looks, [])]
    assert curve == [(0.0, 200.0), (1.0, 0.0), (1.5, 0.0), (9.5, 0.0), (10.0, 100.0)]
    seen = [ServerLook(1e9 + at, 7, 0, None, None, None, 0, {}) for at in (9.0, 11.0)]
    assert [look.running for look in joined(looks, seen)] == [2, 0, 0, 0, 7, 7]
    assert joined(looks, [seen[0]])[-1].running == 1  # what it recorded when nobody looked any more
    quiet = ServerLook(1e9 + 99, 0, 0, None, None, None, 0, {"first_token": (None, None)})
    assert last_busy([*looks, quiet]) is looks[-1]
    assert last_busy([quiet]) is quiet
    assert last_busy([]) is None


def test_a_stop_that_was_asked_for_is_not_red_and_a_failure_is(serve: Serve, tmp_path: Path, tab: Tab) -> None:
    stopped = write_run(tmp_path / "runs", "stopped", nodes=1, steps=3, state="stopped")
    (stopped.path / "STOP").write_text("craton stop\n")
    write_run(tmp_path / "runs", "failed", nodes=1, steps=3, state="failed")
    page = serve()
    colors = (
        "[...document.querySelectorAll('.run-head .state, .run-head .message, .events td')]"
        ".map((each) => getComputedStyle(each).color)"
    )
    for name, is_red in (("stopped", False), ("failed", True)):
        tab.go(f"{page.address}runs/{name}")
        tab.wait_for("document.querySelector('.message') !== null")
        assert (BAD_COLOR in tab.evaluate(colors)) is is_red, name
    tab.go(page.address)
    tab.wait_for("document.querySelectorAll('tr[data-state=reading]').length === 0")
    found = tab.evaluate(
        "Object.fromEntries([...document.querySelectorAll('tr .state')]"
        ".map((each) => [each.textContent, getComputedStyle(each).color]))"
    )
    assert found["failed"] == BAD_COLOR
    assert found["stopped"] != BAD_COLOR


def test_the_list_shows_the_cause_first_and_the_loss(serve: Serve, tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "llama", nodes=1, steps=3, state="failed")
    sentence = "llama has failed: rank 1 ended. Guilty is the framework: the GPU's memory did not suffice."
    told = CachedVerdict("dead", sentence, cause="the GPU's memory did not suffice")
    page = serve(verdicts=Verdicts(lambda run: told))

    def row() -> str:
        return page.ask("GET", "/")[2].partition("<tbody>")[2].partition("</tbody>")[0]

    wait_until(lambda: "dead</b>" in row(), 60)
    why = row().partition('<td class="why">')[2]
    assert '<b class="bad-text">dead</b> the GPU&#39;s memory did not suffice</span>' in why
    assert 'title="llama has failed: rank 1 ended.' in why  # the whole of it, for who points at it
    loss = row().partition('data-loss="')[2].partition('"')[0]
    assert f'<td class="number">{float(loss):.2f}</td>' in row()


@pytest.mark.parametrize(
    ("answer", "short"),
    [
        (CachedVerdict("healthy", "llama runs well, 0.25 s a step."), "runs well, 0.25 s a step."),
        (CachedVerdict("slow", "llama is slow: it takes 4 s a step."), "it takes 4 s a step."),
        (CachedVerdict("slow", "llama is slow: it takes 4 s.", cause="the card is hot"), "the card is hot"),
        (CachedVerdict("waiting", "llama waits as job 7: no node is free."), "waits as job 7: no node is free."),
        (CachedVerdict("unknown", "diagnosis failed: a: b"), "diagnosis failed: a: b"),
        (
            CachedVerdict(
                "dead", "llama has failed: rank 0 on node-0 exited with code 1 (generation 0): ValueError: no."
            ),
            "ValueError: no (rank 0 on node-0 exited with code 1)",
        ),
    ],
)
def test_a_verdict_in_short_has_neither_the_name_nor_the_condition_again(answer: CachedVerdict, short: str) -> None:
    assert answer.in_short("llama") == short


def test_an_error_comes_before_the_rank_that_had_it() -> None:
    assert (
        cause_first("rank 3 on a exited with code -9 (generation 2): killed")
        == "killed (rank 3 on a exited with code -9)"
    )
    assert cause_first("no heartbeat from node-0 for 12 s") == "no heartbeat from node-0 for 12 s"
    assert cause_first("") == ""
