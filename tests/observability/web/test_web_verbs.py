"""The verbs `ui` and `top`, as they are called in a terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from simulated_runs import write_run
from waiting import PATIENCE_SECONDS, wait_until

from craton.errors import CratonError
from craton.observability.web import TopView, frame_json, terminal
from craton.observability.web.http import serve_page
from craton.observability.web.sources import CachedVerdict, Late, prometheus_address
from craton.observability.web.terminal import TopLook
from craton.orchestration import Standing
from craton.orchestration.backend import Submission, write_submission
from craton.telemetry import RunDirectory, RunError
from craton.telemetry.node import Heartbeat, NodeStatus, RankStatus, write_heartbeat, write_status

LATE = Late("rank 5 on node-2 spends 1.50 times as long on the work of a step", (5,), ("node-2",), 0.25)


def test_the_verb_ui_says_where_it_is_and_ends_at_a_signal(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "llama", nodes=1, steps=3)
    token_file = tmp_path / "token"
    command = [
        sys.executable,
        "-m",
        "craton",
        "ui",
        "--port",
        "0",
        "--no-open",
        "--json",
        "--token-file",
        str(token_file),
    ]
    environment = {**os.environ, "CRATON_RUNS": str(tmp_path / "runs")}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        assert told["address"].startswith("http://127.0.0.1:")
        assert "token" not in told["link"]  # it is in the file
        with urllib.request.urlopen(told["address"], timeout=PATIENCE_SECONDS) as answer:
            assert "llama" in answer.read().decode()
        request = urllib.request.Request(f"{told['address']}runs/llama/stop", method="POST")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=PATIENCE_SECONDS)
        assert refused.value.code == 403
        request.add_header("authorization", f"Bearer {token_file.read_text().strip()}")
        with pytest.raises(urllib.error.HTTPError) as not_there:
            urllib.request.urlopen(request, timeout=PATIENCE_SECONDS)
        assert not_there.value.code == 409  # it is no run of this machine: asked, and answered
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE_SECONDS) in (0, 130)
    finally:
        process.kill()
        process.wait()


def test_the_verb_ui_refuses_a_port_that_is_taken_and_an_address_that_is_none(tmp_path: Path) -> None:
    environment = {**os.environ, "CRATON_RUNS": str(tmp_path)}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for option, words in (
            (["--port", str(taken.getsockname()[1])], "another --port"),
            (["--prometheus", "ftp://x"], "write e.g. http://127.0.0.1:9090"),
        ):
            command = [sys.executable, "-m", "craton", "ui", "--no-open", *option]
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
            )
            assert done.returncode == 2
            assert words in done.stderr


def test_top_waits_for_neither_a_scheduler_nor_a_verdict_and_asks_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path, "llama", nodes=1, steps=10)
    write_submission(run, Submission("slurm", job="12"))
    asked, may_answer = [], threading.Event()

    def ask(runs: Iterable[RunDirectory]) -> dict[str, Standing]:
        asked.append("scheduler")
        may_answer.wait(PATIENCE_SECONDS)
        return {run.name: Standing("waiting", reason="Priority") for run in runs}

    def examine(run: RunDirectory, prometheus: str | None) -> CachedVerdict:
        asked.append("why")
        may_answer.wait(PATIENCE_SECONDS)
        return CachedVerdict("slow", "rank 1 is throttled")

    monkeypatch.setattr(terminal, "standings_of", ask)
    with closing(TopView(run, examine=examine)) as top:
        looks = [top.look() for _ in range(3)]
        assert {(look.summary.state, look.verdict) for look in looks} == {("running", None)}
        wait_until(lambda: sorted(asked) == ["scheduler", "why"])
        assert not may_answer.is_set()
        may_answer.set()
        wait_until(lambda: top.look().verdict)
        wait_until(lambda: top.look().summary.message == "Priority")
        assert sorted(asked) == ["scheduler", "why"]


def test_top_as_one_picture_and_as_json(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs", "llama", nodes=4, ranks_per_node=2, steps=10, slow_rank=5)
    look = TopView(
        run,
        examine=lambda run, prometheus: CachedVerdict("slow", "rank 5 is throttled", action="drain node-2", late=LATE),
    ).look(True)
    told = json.loads(json.dumps(frame_json(look), allow_nan=False))
    assert [line["rank"] for line in told["ranks"]] == list(range(8))
    assert told["verdict"]["condition"] == "slow"
    assert {node["node"]: node["health"] for node in told["nodes"]}["node-2"] == "slow"
    assert told["ranks"][5]["phases"]["compute"] > 1.3 * told["ranks"][0]["phases"]["compute"]
    environment = {**os.environ, "CRATON_RUNS": str(tmp_path / "runs")}
    done = subprocess.run(
        [sys.executable, "-m", "craton", "top", "llama"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("llama  ")
    assert "step 10/400" in lines[0]
    ranks = [line.split() for line in lines if line.strip()[:1].isdecimal()]
    assert [words[0] for words in ranks] == [str(rank) for rank in range(8)]
    assert ranks[5][-3].count("c") > 1.3 * ranks[0][-3].count("c")


def test_top_answers_keys_while_a_look_at_the_run_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at a wide run takes a second, or minutes where its folder does not answer."""
    run = write_run(tmp_path, "llama", nodes=2, ranks_per_node=2, steps=10)
    view = TopView(run, examine=lambda run, prometheus: CachedVerdict("healthy", "all is well"))
    first, may_look = view.look(True), threading.Semaphore(0)

    def look() -> TopLook:
        assert may_look.acquire(timeout=PATIENCE_SECONDS)
        return first

    monkeypatch.setattr(view, "look", look)
    monkeypatch.setattr(terminal, "LOOK_SECONDS", 0.0)
    pressed = iter(["s", "a look ends", "s", "q"])

    @contextmanager
    def keys(news: int) -> Iterator[Callable[[], str]]:
        def press() -> str:
            key = next(pressed)
            if key == "a look ends":
                may_look.release()
                os.read(news, 1)
            return key

        yield press

    monkeypatch.setattr(terminal, "_single_keys", keys)
    screen = StringIO()
    terminal.show_top(view, Console(file=screen, force_terminal=True, width=140, height=30))
    may_look.release()  # the one that was under way all the time
    wait_until(lambda: "looks" not in [thread.name for thread in threading.enumerate()])  # nobody draws, and it ends
    text = screen.getvalue()
    assert text.index("reading llama") < text.index("sorted by step time") < text.index("sorted by progress")


def test_top_tells_what_keeps_it_from_looking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view = TopView(write_run(tmp_path, "llama", nodes=1, steps=3))

    def look() -> TopLook:
        raise RunError("the run is gone")

    monkeypatch.setattr(view, "look", look)
    with terminal._Looks(view) as looks:
        os.read(looks.news, 1)
        with pytest.raises(RunError, match="the run is gone"):
            looks.newest()


def test_top_counts_how_long_ago_the_agent_told_of_progress_and_tells_of_a_silent_spare(tmp_path: Path) -> None:
    run = write_run(tmp_path, "llama", nodes=3, ranks_per_node=1, steps=10)
    now = time.time()
    launch = json.loads(run.launch_path.read_text())
    run.launch_path.write_text(json.dumps({**launch, "nodes": [*launch["nodes"], "node-3"]}))
    write_heartbeat(run, "node-3", Heartbeat(0, "spare", 1, 0))
    os.utime(run.heartbeat_path("node-3"), (now - 28, now - 28))
    for node, told_at, age in (("node-0", now, 5.0), ("node-1", now - 300, 2.0), ("node-2", now, 0.0)):
        step = 0 if node == "node-2" else 10  # a command that tells of no progress
        status = RankStatus(int(node[-1]), 1, "productive", (), step, age, 2.0, is_stopped=False)
        write_status(run, NodeStatus(told_at, 0, node, (status,)))
    write_heartbeat(run, "node-1", Heartbeat(0, "stopped", 1, 0))
    look = TopView(run, examine=lambda run, prometheus: CachedVerdict("healthy", "all is well")).look(True)
    assert [line.progress_age_seconds for line in look.ranks] == [
        pytest.approx(5, abs=2),
        pytest.approx(302, abs=2),
        None,
    ]
    assert [line.rank for line in terminal.ordered(look, "progress")] == [1, 0, 2]
    screen = StringIO()
    Console(file=screen, width=140).print(terminal.frame(look, 140, None))
    text = screen.getvalue()
    assert "node-3 is a spare: its agent was last seen 28 s ago" in text
    assert next(line for line in text.splitlines() if " node-1 " in line).split()[2] == "done"


@pytest.mark.parametrize("size", [(80, 24), (100, 30)])
def test_top_keeps_its_legend_and_keys_in_sight_below_a_long_verdict(tmp_path: Path, size: tuple[int, int]) -> None:
    run = write_run(tmp_path, "a-name-as-long-as-the-folder-of-a-run-may-have-it", nodes=8, ranks_per_node=8, steps=3)
    told = CachedVerdict("slow", "rank 5 waits for its loader " * 12, action="look at the loader of rank 5 " * 8)
    look = TopView(run, examine=lambda run, prometheus: told).look(True)
    console = Console(file=StringIO(), width=size[0], height=size[1])
    rows = terminal.rows_that_fit(look, console)
    lines = console.render_lines(terminal._screen(look, run, size[0], rows, "rank", 0))
    assert 0 <= size[1] - len(lines) <= 1
    assert rows >= 3


@pytest.mark.parametrize("given", [None, "http://127.0.0.1:1"])
def test_top_and_the_page_ask_the_prometheus_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    monkeypatch.setenv("CRATON_PROMETHEUS", "http://127.0.0.1:9")
    assert prometheus_address(given) == (given or "http://127.0.0.1:9")
    asked = []

    def examine(run: RunDirectory, prometheus: str | None) -> CachedVerdict:
        asked.append(prometheus)
        return CachedVerdict("healthy", "")

    run = write_run(tmp_path, "llama", nodes=1, steps=3)
    look = TopView(run, given, examine=examine).look(True)
    assert asked == [given or "http://127.0.0.1:9"]
    assert look.trouble.startswith(f"Prometheus at {asked[0]} does not answer")
    monkeypatch.setenv("CRATON_PROMETHEUS", "nonsense")
    with pytest.raises(CratonError, match=r"^\$CRATON_PROMETHEUS 'nonsense' is not an address"):
        serve_page(tmp_path, port=0, announce=lambda address, link: None)


def test_top_without_a_keyboard_prints_one_picture(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "llama", nodes=1, ranks_per_node=2, steps=10)
    ours, terminal = pty.openpty()
    environment = {**os.environ, "CRATON_RUNS": str(tmp_path / "runs"), "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [sys.executable, "-m", "craton", "top", "llama"], env=environment, stdin=subprocess.DEVNULL, stdout=terminal
    )
    try:
        read_until(ours, "phases:")
        assert process.wait(timeout=PATIENCE_SECONDS) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(terminal)


def test_top_in_a_terminal_sorts_and_leaves_with_q(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "llama", nodes=4, ranks_per_node=2, steps=10, slow_rank=5)
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(CRATON_RUNS=str(tmp_path / "runs"), TERM="xterm-256color", COLUMNS="140", LINES="30")
        os.execv(sys.executable, [sys.executable, "-m", "craton", "top", "llama"])
    try:
        seen = read_until(terminal, "sorted by rank")
        assert "node-2" in seen
        os.write(terminal, b"\x1b[C")
        read_until(terminal, "sorted by step time")
        os.write(terminal, b"q")
        wait_until(lambda: os.waitpid(child, os.WNOHANG)[0] == child)
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    finally:
        os.close(terminal)


def read_until(terminal: int, words: str) -> str:
    seen: list[str] = []

    def is_seen() -> bool:
        if select.select([terminal], [], [], 0.1)[0]:
            seen.append(os.read(terminal, 65536).decode(errors="replace"))
        return words in "".join(seen)

    wait_until(is_seen, lambda: "".join(seen)[-2000:])
    return "".join(seen)
