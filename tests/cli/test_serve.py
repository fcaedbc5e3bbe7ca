"""`craton serve`, and what the other verbs do to a server. The engine is a stand-in (tests/orchestration/answering.py),
which answers at the job's address, drains and dies as the engine promises to."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from run_verbs import Result, Verbs, in_a_terminal
from waiting import PATIENCE_SECONDS, wait_until

from craton.agent.processes import free_port
from craton.cli.views import server as server_view
from craton.job import load_job
from craton.orchestration import ServerWatch, Stages, address_of, living_agents
from craton.orchestration.draft import draft
from craton.telemetry import RunDirectory

ANSWERING = Path(__file__).parents[1] / "orchestration" / "answering.py"
NAME = "serve-qwen3-0.6b"
REPLACED = f"""
import sys
from craton.orchestration.draft import draft
draft.rank_command = lambda job, run, python: [python, {str(ANSWERING)!r}, str(run)]
from craton.cli import main
main()
"""


@pytest.fixture
def serve(verbs: Verbs, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`serve(*options)` is `craton serve qwen3-0.6b` on a free port."""
    monkeypatch.setattr(draft, "rank_command", lambda job, run, python: [python, str(ANSWERING), str(run)])

    def run(*options: object) -> Result:
        return verbs("serve", "qwen3-0.6b", "--random-weights", "--port", free_port(), *options)

    return run


def is_ready(run: RunDirectory) -> bool:
    stages = Stages(run)
    stages.look()
    return stages.is_ready and ServerWatch(address_of(load_job(run.job_path))).is_ready()


def signalled(number: signal.Signals, *conditions: Callable[[], object]) -> threading.Thread:
    """Signals this process whenever the next condition has come true."""

    def wait() -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        for condition in conditions:
            while not condition():
                if time.monotonic() > deadline:  # the test has failed, and others run by now
                    return
                time.sleep(0.05)
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_in_the_foreground_until_it_is_told_to_end(
    verbs: Verbs, serve: Callable[..., Result], number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, line, lines = verbs.run(NAME), server_view.state_line, []
    monkeypatch.setattr(server_view, "state_line", lambda *given: lines.append(line(*given)) or lines[-1])
    signalled(number, lambda: len(lines) > 1)  # the first one is on the screen
    result = serve()
    assert result.returncode == 0, result.stdout + result.stderr
    url = address_of(load_job(run.job_path)).url
    for words in (
        f"{NAME}  serve · qwen3-0.6b, 596M parameters · local x 1",
        f"{NAME}: loading weights",
        f"{NAME} serves at {url}",
        "4.24k tokens, maximum",
        "tokens/s for one request",
        f"curl {url}/v1/completions",
        '"prompt": [1, 2, 3]',
        "Ctrl-C drains and stops it",
        "3 running, 1 waiting",
        "first token after 30.0 ms",
        f"{NAME} is draining: 4 open requests may finish within 30 s",
        f"{NAME} stopped",
    ):
        assert words in result.stdout
    assert "has drained" in run.log_path(0).read_text()
    assert living_agents(run) == []


def test_silence_is_only_worth_a_word_while_a_server_should_answer() -> None:
    assert server_view.state_line("srv", None, "running") == "srv: no response"
    assert server_view.state_line("srv", None, "stopping") == "srv: stopping"


def test_a_second_ctrl_c_does_not_wait(verbs: Verbs, serve: Callable[..., Result]) -> None:
    run = verbs.run(NAME)

    def is_busy() -> bool:
        if is_ready(run):
            (run.path / "busy").touch()
        return (run.path / "busy").exists()

    signalled(signal.SIGINT, is_busy, lambda: run.has("STOP"))
    result = serve()
    assert f"{NAME} was killed" in result.stdout
    assert living_agents(run) == []
    assert "has drained" not in run.log_path(0).read_text()


def test_detached_it_is_listed_stopped_and_resumed(verbs: Verbs, serve: Callable[..., Result]) -> None:
    result = serve("--detach", "--served-name", "small")
    assert result.returncode == 0, result.stderr
    run = verbs.run(NAME)
    url = address_of(load_job(run.job_path)).url
    assert f"{NAME} runs in the background" in result.stdout
    assert f"`craton stop {NAME}` drains and stops it" in result.stdout
    assert '"model": "small"' in result.stdout
    assert ServerWatch(address_of(load_job(run.job_path))).is_ready()

    listed = verbs("ps").stdout
    assert f"{NAME}: 3 running, 1 waiting" in listed
    assert url in listed
    assert verbs.json("ps")[0]["state"] == "running"
    logs = verbs("logs", NAME, "--rank", "0").stdout
    assert "rank 0 of 1 begins" in logs

    stopped = verbs("stop", NAME)
    assert stopped.returncode == 0
    assert stopped.stdout == f"{NAME} stopped\nnext: craton resume {NAME}\n"
    assert verbs.json("ps")[0]["state"] == "stopped"

    resumed = verbs("resume", NAME, "--detach")
    assert resumed.returncode == 0, resumed.stderr
    assert "checkpoint" not in resumed.stdout
    wait_until(lambda: is_ready(run))

    again = serve("--detach", "--json")
    assert again.stdout.count("\n") == 1
    ready = json.loads(again.stdout)
    assert (ready["name"], ready["model"], ready["kv_tokens"]) == (f"{NAME}-2", "qwen3-0.6b", 4242), (
        "the next free name"
    )
    assert ready["url"] == address_of(load_job(verbs.run(f"{NAME}-2").job_path)).url
    assert ready["plan_best_tokens_per_second"] > 0


def test_an_engine_that_cannot_start_is_told_in_its_own_words(
    verbs: Verbs, serve: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIL", "craton: the device has too little memory; lower serve.max_running")
    result = serve("--detach")
    assert result.returncode == 1, "there is nothing to leave"
    assert f"{NAME} failed" in result.stdout
    assert (
        "exited with code 3 (generation 0): the device has too little memory; lower serve.max_running" in result.stdout
    )
    assert "checkpoint" not in result.stdout


def test_a_job_file_is_run_and_ctrl_c_leaves_it(verbs: Verbs, serve: Callable[..., Result]) -> None:
    job = verbs.folder / "mine.yaml"
    job.write_text(
        f"kind: serve\nmodel: qwen3-0.6b\ncluster: local\nserve: {{initialize: random, port: {free_port()}}}\n"
    )
    run = verbs.run("mine")
    signalled(signal.SIGINT, lambda: is_ready(run))
    result = verbs("run", job)
    assert result.returncode == 130
    assert "left the view; mine continues. `craton logs mine -f` follows it, `craton stop mine` drains" in result.stdout
    assert living_agents(run)
    assert verbs("stop", "mine", "--now").returncode == 0
    started = verbs("run", job, "--name", "other", "--detach")
    assert started.returncode == 0
    assert "`craton stop other` drains and stops it" in started.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--port", "70000"], "serve.port: 70000 is not a whole number from 1 to 65535"),
        (["--precision", "fp4"], "serve.precision: 'fp4' is not allowed; allowed: bf16, fp8, fp32"),
        (["--tp", "3"], "layout: tp 3 does not divide"),
        (["--max-length", "1M"], "max_length 1,048,576 exceeds the model's maximum sequence length of 40,960 tokens"),
        (["--adapter", "sql"], "--adapter 'sql' is not NAME=FOLDER"),
        (["--adapter", "sql=/nowhere"], "'/nowhere' contains no adapter"),
        (["--api-keys", "NO_SUCH_KEYS"], "serve.api_keys names NO_SUCH_KEYS"),
        (["--cluster", "p5.48xlarge x 2"], "is more than this machine"),
        (["--name", "two words"], "is not a name"),
    ],
)
def test_a_wrong_option_starts_nothing(verbs: Verbs, options: list[str], words: str) -> None:
    result = verbs("serve", "qwen3-0.6b", "--random-weights", *options)
    assert result.returncode == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(verbs.root.glob("*/launch.json"))


def test_a_model_that_cannot_be_served_is_one_line(verbs: Verbs) -> None:
    for model, words in (
        ("qwen3-0.6b", "kind serve requires trained weights, but qwen3-0.6b has none here"),
        ("qwen3-0.6", "did you mean 'qwen3-0.6b'?"),
        ("./nowhere", "nowhere"),
    ):
        result = verbs("serve", model)
        assert result.returncode == 2
        assert words in result.stderr
        assert result.stderr.count("\n") == 1


def test_a_taken_port_starts_nothing(verbs: Verbs) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = verbs("serve", "qwen3-0.6b", "--random-weights", "--port", port)
    assert result.returncode == 2
    assert f"port {port} of 127.0.0.1 is in use; a free port is" in result.stderr
    assert not list(verbs.root.glob("*/launch.json"))


def test_dry_run_prints_the_job_and_starts_nothing(verbs: Verbs) -> None:
    draft = verbs.json("serve", "qwen3-0.6b", "--random-weights", "--tp", "2", "--speculate", "4", "--dry-run")
    written = verbs.folder / "written.yaml"
    written.write_text(draft["files"]["job.yaml"])
    job = load_job(written)
    assert job.serve is not None
    assert (job.kind, job.name, job.serve.draft_tokens) == ("serve", NAME, 4)
    launch = json.loads(draft["files"]["launch.json"])
    assert (launch["ranks_per_node"], launch["nodes"]) == (2, ["node-0"])
    assert launch["command"][1:3] == ["-m", "craton.ml.serving"]
    assert json.loads(draft["files"]["plan.json"])["tp"] == 2
    assert not verbs.root.exists()


def test_experts_are_split_as_written_or_planned(verbs: Verbs) -> None:
    model = ("serve", "mixtral-8x7b", "--random-weights", "--dry-run", "--cluster", "p5.48xlarge x 1")
    for options, sizes in ((("--tp", "4", "--ep", "2"), (4, 2)), ((), (2, 2))):
        draft = verbs.json(*model, *options)
        written = verbs.folder / "written.yaml"
        written.write_text(draft["files"]["job.yaml"])
        layout = load_job(written).served_layout
        assert (layout.tp, layout.ep) == sizes, "the ranks read it"
        assert json.loads(draft["files"]["launch.json"])["ranks_per_node"] == sizes[0]
        plan = json.loads(draft["files"]["plan.json"])
        assert (plan["tp"], plan["ep"]) == sizes
    refused = verbs(*model, "--tp", "4", "--ep", "3")
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert "ep 3 does not divide the model's 8 experts and tp 4" in refused.stderr


def test_a_default_strategy_is_a_key_of_the_job(verbs: Verbs) -> None:
    model = ("serve", "qwen3-0.6b", "--random-weights", "--dry-run")
    draft = verbs.json(*model, "--strategy", "vote:16")
    assert "kind: vote" in draft["files"]["job.yaml"]
    assert "n: 16" in draft["files"]["job.yaml"]
    refused = verbs(*model, "--strategy", "vote:0")
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert "strategy.n: '0' is not a whole number from 1 to 1024" in refused.stderr


def test_a_draft_model_is_chosen_and_planned(verbs: Verbs) -> None:
    model = ("serve", "llama-3.1-8b", "--random-weights", "--dry-run", "--cluster", "p5en.48xlarge x 1")
    draft = verbs.json(*model, "--speculate-model", "llama-3.2-1b", "--speculate-tokens", "3")
    written = verbs.folder / "written.yaml"
    written.write_text(draft["files"]["job.yaml"])
    job = load_job(written)
    assert job.serve is not None
    assert (job.serve.draft_model, job.serve.draft_tokens, job.serve.draft_auto) == ("llama-3.2-1b", 3, False)
    assert json.loads(draft["files"]["plan.json"])["speculation"]["draft_tokens"] == 3
    both = verbs(*model, "--speculate", "2", "--speculate-model", "llama-3.2-1b")
    assert both.returncode == 2
    assert "draft tokens come from ngram or from model; remove one of them" in both.stderr


@pytest.mark.slow
def test_a_terminal_shows_one_line_that_lives(verbs: Verbs) -> None:
    arguments = ["serve", "qwen3-0.6b", "--random-weights", "--port", str(free_port())]
    code, screen = in_a_terminal(verbs, arguments, when="first token after", send=b"\x03", program=("-c", REPLACED))
    assert code == 0
    for words in (f"{NAME} serves at", "3 running, 1 waiting", f"{NAME} is draining", f"{NAME} stopped"):
        assert words in screen
    assert living_agents(verbs.run(NAME)) == []
