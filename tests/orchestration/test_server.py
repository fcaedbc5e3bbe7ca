"""Servers as runs: what is drafted and refused, and with a stand-in for the engine (answering.py) that they start, are
looked at, drain, come back after a fault, and end with the engine's own words when it cannot start."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from counting import wait_for_state
from waiting import wait_until

from craton.agent.processes import free_port
from craton.job import Job, dump_job, load_job, parse_job
from craton.orchestration import (
    RunStateError,
    ServerAddress,
    ServerWatch,
    Stages,
    StartError,
    address_of,
    living_agents,
    serve_job,
    server_name,
    server_of,
)
from craton.orchestration.backend import Submission, write_submission
from craton.orchestration.changes import draft_resize
from craton.orchestration.draft import draft, draft_run
from craton.orchestration.server import check_port
from craton.orchestration.start import start_run, stop_run
from craton.orchestration.start.runs import draft_resume, resume_run, resumed_job
from craton.orchestration.watching import is_server, wait_for_agents
from craton.telemetry import RunDirectory, RunSummary, summarize
from craton.telemetry.node import Heartbeat, write_heartbeat

ANSWERING = Path(__file__).with_name("answering.py")
TINY = "{name: tiny, layers: 2, hidden: 64, ffn_hidden: 128, heads: 4, kv_heads: 2, vocab: 512, max_sequence: 2048}"
RUN = Path("/runs/served")

Start = Callable[..., RunDirectory]


def tiny_job(port: int, tp: int = 1, more: str = "", env: str = "") -> Job:
    return parse_job(
        f"name: served\nkind: serve\nmodel: {TINY}\ncluster: local\nlayout: {{tp: {tp}}}\n"
        f"serve: {{port: {port}, initialize: random{more}}}\nrun: {{env: {{{env}}}}}\n"
    )


@pytest.fixture
def start(root: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts a server whose ranks are the stand-in."""
    monkeypatch.setattr(draft, "rank_command", lambda job, run, python: [python, str(ANSWERING), str(run)])

    def begin(**wanted: object) -> RunDirectory:
        job = tiny_job(free_port(), **wanted)  # type: ignore[arg-type]
        return start_run(draft_run(job, root / job.name, port=free_port()), root)

    return begin


def watch_of(run: RunDirectory) -> ServerWatch:
    return ServerWatch(address_of(load_job(run.job_path)))


def test_a_draft_has_a_plan_and_as_many_ranks_as_share_the_model() -> None:
    draft = draft_run(tiny_job(8000, tp=2, more=", drain: 20s"), RUN)
    assert draft.serving is not None
    assert (draft.plan, draft.serving.tp, draft.num_ranks, draft.launch.nodes) == (None, 2, 2, ["node-0"])
    assert draft.launch.command[-3:] == ["-m", "craton.ml.serving", "/runs/served"]
    assert draft.launch.nursery == [], "ranks of a server are started anew, all together"
    assert draft.launch.stop_grace_seconds > 20.0, "SIGKILL comes after the drain"
    files = draft.files()
    assert set(files) == {"job.yaml", "plan.json", "launch.json"}
    plan = json.loads(files["plan.json"])
    assert (plan["kind"], plan["fits"], plan["kv_tokens"] > 2048) == ("serve", True, True)
    assert parse_job(files["job.yaml"]) == draft.job


BIG = "name: big\nkind: serve\nmodel: llama-3.1-70b\nserve: {initialize: random}\ncluster: p5.48xlarge x 1\n"
REFUSED = {
    "too little memory": (
        BIG + "layout: {tp: 1}\n",
        ["job.yaml:3", "llama-3.1-70b does not fit", "131 GiB of 79.6 GiB", "more ranks", "serve.precision: fp8"],
    ),
    "experts that are too large for one rank": (
        BIG.replace("llama-3.1-70b", "mixtral-8x7b") + "layout: {tp: 4}\n",
        ["mixtral-8x7b does not fit", "experts split over the ranks (layout: {tp: 4, ep: N})"],
    ),
    "no room for one text": (
        BIG.replace("random", "random, max_length: 128k") + "layout: {tp: 2}\n",
        ["131,072 are needed", "a shorter serve.max_length"],
    ),
    "no weights": (BIG.replace("random", "auto"), ["job.yaml:3", "trained weights", "serve.initialize: random"]),
    "keys that are not there": (
        BIG.replace("random", "random, api_keys: NO_SUCH_KEYS"),
        ["serve.api_keys names NO_SUCH_KEYS", "export NO_SUCH_KEYS=KEY"],
    ),
    "an admin key that is not there": (
        BIG.replace("random", "random, admin: true, admin_key: NO_SUCH_KEY"),
        ["serve.admin_key names NO_SUCH_KEY", "export NO_SUCH_KEY=KEY"],
    ),
    "an open server without keys": (
        BIG.replace("random", "random, host: 0.0.0.0"),
        ["serve.host 0.0.0.0 is reachable from other machines", "api_keys: SERVE_KEYS", "listen on 127.0.0.1"],
    ),
    "more than a node": (BIG.replace("x 1", "x 2"), ["job.yaml:5", "more than this machine"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_served_is_refused_before_anything_starts(case: str) -> None:
    text, words = REFUSED[case]
    with pytest.raises(ValueError, match=r"\w") as caught:
        draft_run(parse_job(text), RUN)
    for word in words:
        assert word in str(caught.value)


def test_keys_in_the_environment_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEYS", "one,two")
    job = parse_job(BIG.replace("random", "random, api_keys: MY_KEYS, precision: fp8"))
    written = "".join(draft_run(job, RUN).files().values())
    assert "MY_KEYS" in written
    assert "one,two" not in written


def test_the_job_of_a_model_is_what_a_file_would_say(tmp_path: Path) -> None:
    made = serve_job("qwen3-0.6b", name="mine", tp=2, settings={"port": 9000, "initialize": "random"})
    text = "name: mine\nkind: serve\nmodel: qwen3-0.6b\ncluster: local\nlayout: {tp: 2}\n"
    assert made == parse_job(text + "serve: {port: 9000, initialize: random}\n")
    with pytest.raises(ValueError, match=r"^serve\.port: 99999 is not a whole number from 1 to 65535$"):
        serve_job("qwen3-0.6b", name="mine", settings={"port": 99999})


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("llama-3.1-8b", "serve-llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B", "serve-Llama-3.1-8B"),
        ("./my model/", "serve-my-model"),
        ("s3://bucket/a/" + "x" * 90, "serve-" + "x" * 50),
        ("..", "serve"),
    ],
)
def test_a_server_is_named_after_its_model(model: str, name: str, tmp_path: Path) -> None:
    assert server_name(model, tmp_path) == name
    (tmp_path / name).mkdir()
    assert server_name(model, tmp_path) == f"{name}-2"


def test_a_taken_port_is_told_with_a_free_one(root: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job = tiny_job(port)
        drafted = draft_run(job, root / job.name)
        with pytest.raises(StartError, match=rf"port {port} of 127.0.0.1 is in use; a free port is \d+"):
            start_run(drafted, root)
    assert not (root / job.name).exists()
    check_port(job)


def test_an_address_that_is_not_of_this_machine_is_refused() -> None:
    with pytest.raises(StartError, match="cannot listen on"):
        check_port(tiny_job(8000, more=", host: 192.0.2.1"))
    with pytest.raises(StartError, match=r"host 'no\.such\.host\.invalid' cannot be resolved"):
        check_port(tiny_job(8000, more=", host: no.such.host.invalid"))


def test_a_server_of_all_addresses_is_reached_at_the_first() -> None:
    assert ServerAddress("0.0.0.0", 80).url == "http://127.0.0.1:80"
    assert ServerAddress("::", 80).url == "http://[::1]:80"
    assert ServerAddress("10.0.0.1", 80).url == "http://10.0.0.1:80"


@pytest.mark.parametrize(
    ("listens", "heard_at", "url"),
    [
        ("0.0.0.0", "10.1.2.3:7000", "http://10.1.2.3:8000"),
        ("'::'", "[fd00::7]:7000", "http://[fd00::7]:8000"),
        ("0.0.0.0", "127.0.0.1:7000", "http://far-node:8000"),
        ("10.9.9.9", "10.1.2.3:7000", "http://10.9.9.9:8000"),
    ],
)
def test_a_server_on_another_node_is_asked_there(tmp_path: Path, listens: str, heard_at: str, url: str) -> None:
    run = far_server(tmp_path, listens)
    with pytest.raises(RunStateError, match="none of its nodes has a recent heartbeat"):
        server_of(run)
    write_heartbeat(run, "node-0", Heartbeat(0, "running", 1, 0, heard_at, "far-node"))
    assert server_of(run).url == url
    write_heartbeat(run, "node-0", Heartbeat(0, "running", 1, 0, heard_at, socket.gethostname()))
    assert server_of(run) == address_of(load_job(run.job_path)), "it is this machine"


def test_a_server_that_listens_to_its_own_node_only_is_not_asked_here(tmp_path: Path) -> None:
    run = far_server(tmp_path, "127.0.0.1")
    write_heartbeat(run, "node-0", Heartbeat(0, "running", 1, 0, "10.1.2.3:7000", "far-node"))
    with pytest.raises(
        RunStateError, match=r"listens only on 127\.0\.0\.1 of far-node and cannot be reached from here"
    ):
        server_of(run)


def far_server(root: Path, listens: str) -> RunDirectory:
    run = RunDirectory.create(root, "served")
    run.job_path.write_text(dump_job(tiny_job(8000, more=f", host: {listens}")))
    run.launch_path.write_text(json.dumps({"nodes": ["node-0"]}))
    write_submission(run, Submission("slurm", job="12"))
    return run


def metrics(generated: float, *first_tokens: int, running: int = 1) -> str:
    """Times to the first token were so often below 0.1, 0.2 and 0.4 s, or above."""
    bounds = ("0.1", "0.2", "0.4", "+Inf")
    name = "vllm:time_to_first_token_seconds_bucket"
    buckets = [f'{name}{{le="{bound}"}} {sum(first_tokens[: i + 1])}' for i, bound in enumerate(bounds)]
    lines = [f"vllm:num_requests_running {running}", f"vllm:generation_tokens_total {generated}", *buckets]
    return "\n".join(lines) + "\n"


def test_rates_and_medians_are_those_of_late() -> None:
    watch = ServerWatch(ServerAddress("127.0.0.1", 1))
    first = watch.take(metrics(1000, 10, 0, 0, 0), 100.0)
    assert (first.running, first.waiting, first.tokens_per_second) == (1, 0, None)
    assert first.first_token_seconds == pytest.approx(0.05)
    later = watch.take(metrics(1400, 10, 0, 4, 0), 102.0)
    assert later.tokens_per_second == pytest.approx(200.0)
    assert later.first_token_seconds == pytest.approx(0.3), "four slow ones came since"
    idle = watch.take(metrics(1400, 10, 0, 4, 0), 110.0)
    assert idle.tokens_per_second is None or idle.tokens_per_second == 0.0
    quiet = watch.take(metrics(1400, 10, 0, 4, 0), 300.0)
    assert quiet.first_token_seconds == pytest.approx(0.07), "nothing of late: since the start"
    anew = watch.take(metrics(5, 0, 0, 0, 1), 301.0)
    assert anew.tokens_per_second is None
    assert anew.first_token_seconds == pytest.approx(0.4), "beyond the last bound is at least that"


def test_nobody_there_is_no_state() -> None:
    watch = ServerWatch(ServerAddress("127.0.0.1", free_port()))
    assert not watch.is_ready()
    assert watch.look() is None


def ready(run: RunDirectory) -> ServerWatch:
    watch = watch_of(run)
    wait_until(watch.is_ready)
    return watch


def stopped(run: RunDirectory) -> RunSummary:
    summary = wait_for_state(run, "stopped", "done", "failed", "lost")
    wait_for_agents(run)
    return summary


def test_a_server_is_looked_at_and_a_stop_lets_requests_finish(start: Start) -> None:
    run = start(tp=2)
    watch, stages = ready(run), Stages(run)
    assert is_server(run)
    told: list[str] = []
    wait_until(lambda: told.extend(stages.look()) or stages.is_ready)  # type: ignore[func-returns-value]
    assert told == ["loading weights", "ready"]
    assert stages.newest["kv_tokens"] == 4242
    state = watch.look()
    assert state is not None
    assert (state.running, state.waiting, state.first_token_seconds) == (3, 1, pytest.approx(0.03))
    wait_until(lambda: summarize(run).state == "running")

    (run.path / "busy").touch()
    stop_run(run)
    wait_until(lambda: not watch.is_ready())
    assert watch.look() is not None, "it still answers those it has"
    assert living_agents(run)
    (run.path / "busy").unlink()
    assert stopped(run).state == "stopped"
    assert "rank 0 has drained" in run.log_path(0).read_text()


def test_a_dead_rank_brings_all_of_them_back_as_often_as_may_be(start: Start) -> None:
    run = start(tp=2)
    watch = ready(run)

    def begun(rank: int) -> int:
        return run.log_path(rank).read_text().count("begins")

    for times, rank in ((2, 1), (3, 0), (4, 1)):
        (run.path / f"die-{rank}").touch()
        wait_until(lambda times=times: begun(0) == begun(1) == times)  # type: ignore[misc]
        wait_until(watch.is_ready)
    (run.path / "die-1").touch()
    summary = stopped(run)
    assert summary.state == "failed"
    assert "rank 1 on node-0 exited with code 1" in summary.message
    assert "failure 4 in a row" in summary.message


def test_an_engine_that_cannot_start_ends_the_run_with_its_own_words(start: Start) -> None:
    words = "craton: there is room for 12 tokens of keys and values; lower max_length"
    summary = stopped(run := start(tp=2, env=f"FAIL: '{words}'"))
    assert summary.state == "failed"
    assert "there is room for 12 tokens of keys and values; lower max_length" in summary.message.splitlines()[0]
    assert summary.generation == 0
    assert all(run.log_path(rank).read_text().count("begins") <= 1 for rank in (0, 1)), "no second try"


def test_a_stopped_server_is_resumed_where_its_port_is_free(start: Start) -> None:
    run = start()
    ready(run)
    with pytest.raises(RunStateError, match="kind serve"):
        draft_resize(run, 2)
    with pytest.raises(StartError, match=r"is in use by the run served \(`craton stop served` ends it\)"):
        check_port(load_job(run.job_path))
    stop_run(run)
    assert stopped(run).state == "stopped"
    again = draft_resume(run, resumed_job(run))
    port = address_of(again.job).port
    with socket.create_server(("127.0.0.1", port)), pytest.raises(StartError, match=f"port {port} .* is in use"):
        resume_run(run, again)
    assert run.has("STOP"), "a resume that is refused leaves the run as it was"
    resume_run(run, again)
    ready(run)
    assert summarize(run).generation == 1
