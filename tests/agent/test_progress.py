"""The progress of a job's own command: from its output, from its metrics, and what the agent makes of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from agent_gang import Gang, is_alive
from waiting import PATIENCE_SECONDS, wait_until

from craton.agent import LaunchError
from craton.agent.processes.process import GROUP_SECONDS, _end_orphans
from craton.agent.progress import (
    LINE_BYTES,
    LOOK_BYTES,
    NEVER_SECONDS,
    SLOW_LOOKS,
    LogTail,
    Matcher,
    Scraper,
    _patience,
    _timed,
)
from craton.job import parse_job
from craton.observability.diagnosis.collect.metrics import series_of
from craton.observability.web.readers import History
from craton.telemetry import summarize
from craton.telemetry.files import read_lines

STEPS = r"step (?P<step>\d+)/(?P<steps>\d+) loss (?P<loss>\S+)"
CATASTROPHE = r"step (?P<step>(\d+)+)+$"  # every way to cut the digits is tried before it fails


def progress_settings(**changes: Any) -> dict[str, Any]:
    return {"patterns": [STEPS], "rank": 0, "has_steps": True, "hang_times": 0, "hang_seconds": 0, **changes}


def metrics(gang: Gang) -> list[dict[str, Any]]:
    return [line for line in read_lines(gang.run.metrics_path("node-0"))[0] if line["rank"] == 0]


# -- reading ------------------------------------------------------------------------------------------------------


def test_a_log_is_read_as_it_grows_and_never_half_a_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"of the process before\n")
    tail = LogTail(log, log.stat().st_size)
    assert tail.read() == []
    with open(log, "ab", buffering=0) as writer:
        writer.write(b"one\n\x1b[31mtwo\x1b[0m\n 10%\r 20%\rha")
        assert tail.read() == ["one", "two", " 10%", " 20%"]
        writer.write(b"lf\n")
        assert tail.read() == ["half"]
        writer.write(b"\xff\xfe\n")
        assert tail.read() == ["\ufffd\ufffd"]


def test_a_log_without_end_or_without_line_ends_is_cut(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tail = LogTail(log, 0)
    assert tail.read() == []
    log.write_bytes(b"x" * 10 * LINE_BYTES)
    assert tail.read() == []
    log.write_bytes(log.read_bytes() + b"\nnext\n")
    first, second = tail.read()
    assert (len(first), second) == (LINE_BYTES, "next")
    log.write_bytes(log.read_bytes() + b"fast\n" * LOOK_BYTES + b"last\n")
    lines = tail.read()
    assert lines[-1] == "last"
    assert len(lines) < LOOK_BYTES
    log.write_bytes(b"begun anew\n")
    assert tail.read() == ["begun anew"]


def test_of_a_line_whose_beginning_was_skipped_nothing_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tail = LogTail(log, 0)
    line = b"step 1234/9999 loss 1\n"
    log.write_bytes(line * (LOOK_BYTES // len(line) + 100))
    assert set(tail.read()) == {line.decode().strip()}
    log.write_bytes(log.read_bytes() + b"x" * 2 * LOOK_BYTES)
    assert tail.read() == []
    log.write_bytes(log.read_bytes() + b" step 7")
    assert tail.read() == []
    log.write_bytes(log.read_bytes() + b"8\r\nnext\n")
    assert tail.read() == ["next"]
    log.write_bytes(log.read_bytes() + b"x" * 2 * LOOK_BYTES)
    assert tail.read(to_the_end=True) == []


def test_the_last_line_needs_no_end_once_nothing_more_is_written(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tail = LogTail(log, 0)
    log.write_bytes(b"\r 50%\r 100%")
    assert tail.read() == [" 50%"]
    assert tail.read(to_the_end=True) == [" 100%"]
    assert tail.read(to_the_end=True) == []


def test_lines_were_written_between_two_looks_whatever_the_clock_of_a_file_server_says() -> None:
    found = [{"step": 1.0}, {"step": 2.0}]
    assert [each.moment for each in _timed(found, 10.0, 12.0, 14.0)] == [11.0, 12.0]
    assert [each.moment for each in _timed(found, 10.0, 3600.0, 14.0)] == [12.0, 14.0]
    assert [each.moment for each in _timed(found, 10.0, 3.0, 14.0)] == [10.0, 10.0]


@pytest.mark.parametrize(
    ("template", "line", "values"),
    [
        (
            "step {step}/{steps} loss {loss}",
            "12:01 step  7/400  loss 3.25, lr 1e-4",
            (("step", 7), ("steps", 400), ("loss", 3.25)),
        ),
        (
            "{step} | {loss} | {tokens_per_second} tok/s",
            "1,200 | 2.5e-1 | 5.7k tok/s",
            (("step", 1200), ("loss", 0.25), ("tokens_per_second", 5700)),
        ),
        ("iter {step}: {loss}", "iter 3: -.5", (("step", 3), ("loss", -0.5))),
        (r"(?P<step>\d+)/(?P<steps>\d+) \[", " 10%|# | 50/500 [00:05", (("step", 50), ("steps", 500))),
        ("step {step} loss {loss}", "loss 3 step 4", ()),
        ("step (a) {step}", "step (a) 4", (("step", 4),)),
    ],
)
def test_patterns_find_numbers_as_programs_write_them(template: str, line: str, values: tuple[Any, ...]) -> None:
    job = parse_job(f"kind: command\ncommand: x\ncluster: local\nprogress: {{pattern: {json.dumps(template)}}}\n")
    assert job.progress is not None
    found = Matcher(job.progress.pattern).find([line])
    assert found == ([dict(values)] if values else [])


def test_what_is_not_a_number_is_not_one_and_several_patterns_add_up() -> None:
    matcher = Matcher([STEPS, r"lr (?P<learning_rate>\S+)"])
    assert matcher.find(["step 1/9 loss nan lr 0.1"])[0]["learning_rate"] == 0.1
    assert matcher.find(["step 1/9 loss high"]) == [{"step": 1.0, "steps": 9.0}]
    assert matcher.find(["lr 3"]) == [{"learning_rate": 3.0}]
    with pytest.raises(LaunchError, match="not a regular expression"):
        Matcher(["("])


def test_a_pattern_that_would_take_for_ever_is_given_up() -> None:
    matcher = Matcher([CATASTROPHE])
    assert matcher.find(["step 12"]) == [{"step": 12.0}]
    for _ in range(10):
        assert matcher.find([f"step {'1' * 60}x"]) == []  # to the end it would take 2**60 tries
    assert matcher.slow_looks == SLOW_LOOKS, "then it looks no more"
    assert signal.getsignal(signal.SIGVTALRM) == signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_counters_become_rates_and_samples_of_several_engines_one_number() -> None:
    names = {"vllm:tokens_total": "tokens_per_second", "running": "requests", "steps_total": "step"}
    scraper = Scraper("http://127.0.0.1:9", names, 3600)
    text = (
        '# TYPE vllm:tokens counter\nvllm:tokens_total{{engine="0"}} {0}\nvllm:tokens_total{{engine="1"}} {0}\n'
        '# TYPE running gauge\nrunning{{engine="0"}} 3\nrunning{{engine="1"}} 5\nsteps_total 7\nother 1\n'
    )
    assert scraper._read(text.format(100), 10.0).values == {"requests": 4.0, "step": 7.0}
    assert scraper._read(text.format(150), 20.0).values == {"tokens_per_second": 10.0, "requests": 4.0, "step": 7.0}
    assert "tokens_per_second" not in scraper._read(text.format(5), 30.0).values
    scraper.close()


@pytest.mark.parametrize(
    ("times", "least", "intervals", "seconds"),
    [
        (0, 0, [1], NEVER_SECONDS),
        (20, 300, [], NEVER_SECONDS),
        (20, 300, [1], 300),
        (20, 300, [30], 600),
        (3, 0, [10], 30),
        (3, 0, [0.01], 4),
        (3, 0, [0.2, 0.2, 0.2, 4.65], 2.5 * 4.65),  # the slowest of the recent ones counts
        (0, 900, [], 900),
        (0, 900, [1000], 900),  # a time that the job fixes
    ],
)
def test_how_long_nothing_may_happen(times: float, least: float, intervals: list[float], seconds: float) -> None:
    assert _patience(times, least, intervals) == seconds


# -- under an agent -----------------------------------------------------------------------------------------------


def test_another_rank_than_the_first_may_report_the_steps(gang: Gang) -> None:
    gang.launch(
        "for step in range(1, 21):\n    print(f'step {step}/20 loss {2 / step}', flush=True)\n",
        ranks_per_node=2,
        progress=progress_settings(rank=1),
    )
    assert gang.finish() == 0
    summary = summarize(gang.run)
    assert (summary.step, summary.steps, summary.loss) == (20, 20, pytest.approx(0.1))
    assert History(gang.run).look().steps == list(range(1, 21))
    assert [step for step, _ in series_of(gang.run, ["node-0"]).loss] == list(range(1, 21))


def test_steps_that_a_command_prints_are_metrics_of_its_run(gang: Gang) -> None:
    gang.launch(
        "for step in range(1, 21):\n    print(f'step {step}/20 loss {2 / step}', flush=True)\n    time.sleep(0.05)\n",
        progress=progress_settings(),
    )
    assert gang.finish() == 0
    lines = metrics(gang)
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert lines[-1]["run_loss"] == pytest.approx(0.1)
    summary = summarize(gang.run)
    assert (summary.state, summary.step, summary.steps, summary.loss) == ("done", 20, 20, pytest.approx(0.1))
    assert 0.01 < summary.step_seconds < sum(summary.ledger.values())
    assert summary.ledger["start"] > 0
    assert 0.45 < summary.ledger["productive"] < sum(summary.ledger.values())


@pytest.mark.slow
def test_steps_that_are_seen_together_took_no_longer_than_since_the_last_look(gang: Gang) -> None:
    gang.launch(  # its sleeps are what is measured: a start that is long, and an end after the last look
        "time.sleep(3)\nfor step in range(1, 6):\n    print(f'step {step}/5 loss 1', flush=True)\ntime.sleep(0.3)\n",
        progress=progress_settings(),
    )
    assert gang.finish() == 0
    summary = summarize(gang.run)
    assert summary.step == 5
    assert summary.ledger["start"] > 2.5
    assert summary.ledger["productive"] < summary.ledger["start"]


def test_the_last_state_of_a_progress_bar_is_read(gang: Gang) -> None:
    gang.launch(
        "for step in range(1, 6):\n    print(f'\\rstep {step}/5 loss 1', end='', flush=True)\n    time.sleep(0.05)\n",
        progress=progress_settings(),
    )
    assert gang.finish() == 0
    assert [line["step"] for line in metrics(gang)] == [1, 2, 3, 4, 5]
    assert summarize(gang.run).step == 5


@pytest.mark.slow
def test_no_time_is_booked_twice_when_a_log_seems_to_be_written_in_the_future(gang: Gang) -> None:
    gang.launch(
        """
for step in range(1, 11):
    print(f"step {step}/10 loss 1", flush=True)
    os.utime(1, (time.time() + 3600,) * 2)
    time.sleep(0.1)
""",
        progress=progress_settings(),
    )
    assert gang.finish() == 0
    booked = [line["seconds"] for line in read_lines(gang.run.ledger_path("node-0"))[0]]
    assert min(seconds for line in booked for seconds in line.values()) >= 0
    assert sum(summarize(gang.run).ledger.values()) < 60
    assert max(line["time"] for line in metrics(gang)) <= time.time()


@pytest.mark.parametrize("is_seen_late", [False, True])
def test_a_command_that_stops_printing_steps_is_started_again(gang: Gang, is_seen_late: bool) -> None:
    gang.launch(
        f"""
first = int(os.environ["CRATON_GENERATION"]) == 1
for step in range(1, 9):
    print(f"step {{step}}/8 loss 1", flush={not is_seen_late} or step in (5, 8))
    time.sleep({0.0 if is_seen_late else 0.05})
    if step == 5 and first:
        signal.pause()
""",
        progress=progress_settings(hang_times=3.0),
    )
    assert gang.finish() == 0
    started = [event for event in gang.events() if event["event"] == "generation_started"]
    assert "rank 0 hangs in productive at step 6: no progress for" in started[1]["reason"]
    recovered = next(event for event in gang.events() if event["event"] == "recovered")
    assert recovered["lost_steps"] == 5
    assert "repeats 5 steps" in recovered["message"]
    assert summarize(gang.run).ledger["redo"] > 0


@pytest.mark.parametrize("moves", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_only_failures_without_a_new_step_in_between_are_counted(gang: Gang, moves: bool) -> None:
    gang.launch(
        f"""
saved = HERE / "saved"
step = int(saved.read_text()) if saved.exists() else 0
for step in range(step + 1, step + 3):
    print(f"step {{step}}/8 loss 1", flush=True)
    time.sleep(0.3)
    if {moves}:
        saved.write_text(str(step))
if step < 8:
    sys.exit("no luck")
""",
        progress=progress_settings(),
        tries=1,
        early_seconds=60.0,
    )
    assert gang.finish() == (0 if moves else 1)
    if not moves:
        assert "this was failure 2 in a row at step 3" in gang.run.marker_text("FATAL")


def test_a_command_that_fails_at_once_without_a_step_is_wrong(gang: Gang) -> None:
    gang.launch("print('no such option', flush=True)\nsys.exit(1)\n", progress=progress_settings())
    assert gang.finish() == 1
    assert gang.event_names().count("generation_started") == 1
    assert "within 10 s of its first start, before a step: not retried" in gang.run.marker_text("FATAL")


@pytest.mark.parametrize(("workdir", "starts"), [("", 1), ("/", 2)])
def test_an_exit_code_of_the_user_s_own_program_has_no_meaning_for_craton(
    gang: Gang, workdir: str, starts: int
) -> None:
    settings = progress_settings()
    gang.launch("sys.exit(3)\n", progress=settings, workdir=workdir, tries=1, early_seconds=0.0)
    assert gang.finish() == 1
    assert gang.event_names().count("generation_started") == starts


def test_no_pattern_can_hold_up_the_agent(gang: Gang) -> None:
    gang.launch(
        "say('ready')\nfor _ in range(400):\n    print('step ' + '1' * 60 + 'x', flush=True)\n    time.sleep(0.01)\n",
        progress=progress_settings(patterns=[CATASTROPHE]),
    )
    assert gang.finish() == 0
    event = next(event for event in gang.events() if event["event"] == "progress_given_up")
    assert "write it without nested repetitions" in event["message"]


@pytest.mark.slow
def test_metrics_that_a_command_serves_are_read(gang: Gang) -> None:
    source = {"address": "http://127.0.0.1:{master_port}/metrics", "names": {"s": "step", "l": "loss"}, "every": 0.05}
    gang.launch(
        """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Handler.asked += 1
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"s {Handler.asked}\\nl {1 / Handler.asked}\\n".encode())
server = http.server.HTTPServer(("127.0.0.1", int(os.environ["MASTER_PORT"])), Handler)
while Handler.asked < 8:
    server.handle_request()
time.sleep(0.5)
""",
        progress=progress_settings(patterns=[], prometheus=source),
    )
    assert gang.finish() == 0
    lines = metrics(gang)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[3]["run_loss"] == 0.25


# -- the process --------------------------------------------------------------------------------------------------


def test_placeholders_are_filled_in_for_every_process_and_other_braces_stay(gang: Gang) -> None:
    words = ["{node_rank}/{num_nodes}", "{rank}/{world_size}", "{local_rank}", "{run}", '{"a": {b}}', "{gpus_per_node}"]
    code = "import os, sys; print(sys.argv[1:], os.environ['MINE'], os.environ['CRATON_RANK'], os.getcwd())"
    gang.launch(
        "",
        command=["python", "-c", code, *words, "${rank}", "{{rank}}", "x${{run}}{rank}"],
        ranks_per_node=2,
        gpus_per_node=8,
        env={"MINE": "{rank} of {world_size}"},
        workdir=str(gang.folder),
    )
    assert gang.finish() == 0
    printed = gang.run.log_path(1).read_text().strip()
    shown = ["0/1", "1/2", "1", str(gang.run.path), '{"a": {b}}', "8", "${rank}", "{rank}", "x${run}1"]
    assert printed == f"{shown} 1 of 2 1 {gang.folder}"


def test_a_text_for_the_shell_gets_nothing_but_its_environment(gang: Gang) -> None:
    gang.launch("", command=["/bin/sh", "-c", 'echo "{rank} $CRATON_RANK $CRATON_NUM_NODES"'])
    assert gang.finish() == 0
    assert gang.run.log_path(0).read_text().strip() == "{rank} 0 1"


def test_nothing_is_left_of_a_launcher_that_is_killed(gang: Gang) -> None:
    """As torchrun does it: workers in sessions of their own, which no signal to the launcher's group reaches."""
    gang.launch(
        """
import subprocess
worker = subprocess.Popen(["sleep", "600"], start_new_session=True, env={**os.environ, "RANK": "7"})
say("ready", f"{os.getpid()} {worker.pid}")
signal.pause()
""",
        tries=0,
    )
    agent = gang.start()
    launcher, worker = map(int, gang.said("ready", 0).split())
    assert is_alive(worker)
    os.kill(launcher, signal.SIGKILL)
    wait_until(lambda: not is_alive(worker), "the worker is gone")
    assert agent.wait(PATIENCE_SECONDS) == 1


def test_a_process_that_cannot_be_killed_does_not_hold_up_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one is that has become another user."""
    values = {"run": "/runs/a", "rank": "3"}
    environment = {f"CRATON_{name.upper()}": value for name, value in values.items()}
    orphan = subprocess.Popen(["sleep", "60"], env={**os.environ, **environment, "LAST": "1"})
    try:
        wait_until(lambda: b"CRATON_RANK=3" in Path(f"/proc/{orphan.pid}/environ").read_bytes(), "it has begun")
        with monkeypatch.context() as patched:
            patched.setattr("os.kill", refuse)
            ending = threading.Thread(target=_end_orphans, args=(values, set()), daemon=True)
            ending.start()
            ending.join(5 * GROUP_SECONDS)
            assert not ending.is_alive()
        assert orphan.poll() is None
        _end_orphans(values, set())
        assert not is_alive(orphan.pid)
    finally:
        orphan.kill()
        orphan.wait()


def refuse(pid: int, number: int) -> None:
    raise PermissionError(pid)


@pytest.mark.parametrize(
    ("together", "code", "state"),
    [
        (True, 1, "stopped"),
        pytest.param(False, 1, "failed", marks=pytest.mark.slow),
        pytest.param(False, 143, "stopped", marks=pytest.mark.slow),
    ],
)
def test_what_a_command_exits_with_when_it_is_stopped(gang: Gang, together: bool, code: int, state: str) -> None:
    gang.launch(
        f"signal.signal(signal.SIGTERM, lambda *_: os._exit({code}))\nsay('ready')\nsignal.pause()\n",
        exits_together=together,
    )
    agent = gang.start()
    gang.said("ready", 0)
    gang.run.mark("STOP", "a test")
    assert agent.wait(PATIENCE_SECONDS) == (1 if state == "failed" else 0)
    assert summarize(gang.run).state == state
