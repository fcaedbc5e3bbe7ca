"""What breaks a node, and what is left of it: no process, a reason in FATAL, and books that add up."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time

import pytest
from agent_gang import Gang, is_alive
from waiting import PATIENCE_SECONDS, wait_until

from craton.observability.diagnosis import diagnose
from craton.observability.diagnosis.collect import take_snapshot
from craton.telemetry import summarize
from craton.telemetry.files import read_lines

STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
say("ready")
wait_for("never")
"""


def test_a_failing_rank_ends_the_others_and_says_why(gang: Gang) -> None:
    gang.launch(
        """
if RANK == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # hangs in a collective
    say("ready")
    wait_for("never")
from craton.telemetry.rank import LedgerClock, Recorder
Recorder.from_environment().ledger(1, LedgerClock().take())
wait_for("ready-0")
print("loading the data")
raise RuntimeError("token 99999 is outside the vocabulary")
""",
        ranks_per_node=2,
        failure_grace_seconds=0.5,
    )
    assert gang.finish() == 1
    assert not is_alive(int(gang.said("ready", 0)))
    fatal = gang.run.marker_text("FATAL")
    why = "RuntimeError: token 99999 is outside the vocabulary"
    assert fatal.startswith(f"rank 1 on node-0 exited with code 1 (generation 1): {why} (<string>:")
    assert "\n  RuntimeError: token 99999 is outside the vocabulary\n" in fatal
    assert "loading the data" in fatal
    assert "rank 0" not in fatal  # killed by us, not the cause
    summary = summarize(gang.run)
    assert summary.state == "failed"
    assert summary.message == fatal.strip()
    lines, _ = read_lines(gang.run.ledger_path("node-0"))
    closing = {line["rank"]: line for line in lines if "ended" in line}
    assert closing[0]["seconds"].keys() == closing[1]["seconds"].keys() == {"detect"}
    assert {line["ended"] for line in closing.values()} == {"failed"}
    assert {line["rank"]: line["died_in"] for line in lines if "died_in" in line} == {0: "productive", 1: "productive"}


def test_a_rank_killed_by_a_signal(gang: Gang) -> None:
    gang.launch('say("ready"); wait_for("never")', ranks_per_node=2)
    agent = gang.start()
    gang.said("ready", 0)
    os.kill(int(gang.said("ready", 1)), signal.SIGKILL)
    assert agent.wait(PATIENCE_SECONDS) == 1
    first_line, advice = gang.run.marker_text("FATAL").splitlines()[:2]
    assert first_line.startswith("rank 1 on node-0 was killed by SIGKILL (generation ")
    assert "no OOM kill" in advice


def test_a_rank_command_that_does_not_exist(gang: Gang) -> None:
    gang.launch("", command=["no-such-program", "--fast"])
    assert gang.finish() == 1
    assert "cannot start 'no-such-program': No such file or directory" in gang.run.marker_text("FATAL")


def test_ranks_that_do_not_stop_are_killed_after_the_grace(gang: Gang) -> None:
    gang.launch(STUBBORN, stop_grace_seconds=0.5)
    agent = gang.start()
    pid = int(gang.said("ready", 0))
    gang.run.mark("STOP")
    assert agent.wait(PATIENCE_SECONDS) == 1
    assert not is_alive(pid)
    assert "rank 0 on node-0 did not exit within 500 ms of SIGTERM" in gang.run.marker_text("FATAL")


def test_ranks_die_with_a_killed_agent_and_a_new_one_can_start_at_once(gang: Gang) -> None:
    gang.launch(STUBBORN, ranks_per_node=2)
    agent = gang.start()
    pids = [int(gang.said("ready", rank)) for rank in (0, 1)]
    agent.kill()
    agent.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in pids), "the ranks of a killed agent are gone")
    summary = summarize(gang.run, now=time.time() + 11)
    assert summary.state == "lost"
    assert summary.message.startswith("no heartbeat from node-0")
    gang.launch("", generation=2)
    assert gang.finish() == 0
    assert summarize(gang.run).state == "done"


def test_a_stopped_agent_is_named_with_the_remedy(gang: Gang) -> None:
    gang.launch('say("ready"); wait_for("go")')
    agent = gang.start()
    gang.said("ready", 0)
    agent.send_signal(signal.SIGSTOP)
    later = time.time() + 11
    wait_until(lambda: "is stopped" in summarize(gang.run, now=later).message, "the signal has arrived")
    why = f"the agent of node-0 (process {agent.pid}) is stopped by a signal"
    remedy = f"`kill -CONT {agent.pid}`"
    summary = summarize(gang.run, now=later)
    assert (summary.state, summary.message) == ("lost", f"{why}; continue it with {remedy}")
    verdict = diagnose(take_snapshot(gang.run, now=later))
    assert (verdict.cause, verdict.node) == ("agent_stopped", "node-0")
    assert why in verdict.sentence
    assert remedy in verdict.sentence
    agent.send_signal(signal.SIGCONT)
    gang.tell("go")
    assert agent.wait(PATIENCE_SECONDS) == 0
    assert summarize(gang.run).state == "done"


def test_the_failure_of_another_node_ends_this_one(gang: Gang) -> None:
    gang.launch(STUBBORN, nodes=["a", "b"], failure_grace_seconds=0.2)
    agents = [gang.start(0), gang.start(1)]
    pids = [int(gang.said("ready", rank)) for rank in (0, 1)]
    gang.run.mark("FATAL", "rank 0 on a exited with code 3")
    assert [agent.wait(PATIENCE_SECONDS) for agent in agents] == [1, 1]
    assert not any(is_alive(pid) for pid in pids)
    assert gang.run.marker_text("FATAL") == "rank 0 on a exited with code 3\n"


def test_the_run_is_not_done_before_every_node_is(gang: Gang) -> None:
    gang.launch('wait_for("go") if RANK == 1 else say("over")\nsys.exit(4 * RANK)', nodes=["a", "b"])
    agents = [gang.start(0), gang.start(1)]
    wait_until(lambda: "rank_ended" in gang.event_names("a"), "the first node's rank has ended")
    assert agents[0].poll() is None
    assert not gang.run.has("DONE")
    gang.tell("go")
    assert [agent.wait(PATIENCE_SECONDS) for agent in agents] == [1, 1]
    assert "rank 1 on b exited with code 4" in gang.run.marker_text("FATAL")
    assert not gang.run.has("DONE")


def test_garbage_and_torn_lines_of_a_rank_are_dropped_and_counted(gang: Gang) -> None:
    gang.launch(
        """
from craton.telemetry.rank import Recorder
recorder = Recorder.from_environment()
pipe = int(os.environ["CRATON_RECORDS"])
recorder.metrics(1, run_loss=1.0)
for garbage in (b"not json", b"[1, 2]", b'{"to":"elsewhere","step":1,"time":1}', b"\\xff\\xfe", b'{"to":"met'):
    os.write(pipe, garbage + b"\\n")
recorder.event("long", 1, text="x" * 300_000)  # longer than a pipe takes at once
recorder.metrics(2, run_loss=float("nan"))
os.write(pipe, b'{"to":"metrics","step":3,"ti')
"""
    )
    assert gang.finish() == 0
    lines, _ = read_lines(gang.run.metrics_path("node-0"))
    assert [line["run_loss"] for line in lines if line["rank"] == 0] == [1.0, None]
    events = {line["event"]: line for line in gang.events()}
    assert len(events["long"]["text"]) == 300_000
    assert events["agent_ended"]["garbage_lines"] == 6


def test_a_file_that_takes_nothing_costs_its_records_and_not_the_run(gang: Gang) -> None:
    gang.run.metrics_path("node-0").symlink_to("/dev/full")
    gang.launch(
        """
from craton.telemetry.rank import Recorder
recorder = Recorder.from_environment()
for step in range(1, 4):
    recorder.metrics(step, run_loss=1.0)
    recorder.event("stepped", step)
    time.sleep(0.05)
"""
    )
    agent = gang.start()
    wait_until(lambda: gang.run.has("DONE"), "the run is done")
    agent.send_signal(signal.SIGTERM)  # or it would wait longer for room
    assert agent.wait(PATIENCE_SECONDS) == 0
    events = gang.events()
    assert sum(line["event"] == "stepped" for line in events) == 3
    assert "storage_failed" in gang.event_names()
    assert "run is done on node-0, but the last records could not be written" in gang.errors()


def test_a_run_directory_that_vanishes_ends_the_ranks(gang: Gang) -> None:
    gang.launch('say("ready"); wait_for("never")')
    agent = gang.start()
    pid = int(gang.said("ready", 0))
    shutil.rmtree(gang.run.path)
    assert agent.wait(PATIENCE_SECONDS) == 1
    assert not is_alive(pid)
    assert f"the run directory {gang.run.path} is gone" in gang.errors()


def test_nothing_a_rank_started_outlives_it(gang: Gang) -> None:
    gang.launch(
        """
import subprocess
program = [sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"]
helper = subprocess.Popen(program, stdout=subprocess.PIPE)
helper.stdout.readline()
say("helper", str(helper.pid))
"""
    )
    assert gang.finish() == 0
    helper = int(gang.said("helper", 0))
    assert not is_alive(helper)
    assert not os.path.exists(f"/proc/{helper}"), "an orphan was not reaped"


def test_one_agent_a_node(gang: Gang) -> None:
    gang.launch('say("ready"); wait_for("go")')
    agent = gang.start()
    gang.said("ready", 0)
    assert gang.finish() == 2
    assert "another agent of node-0 is already running" in gang.errors()
    gang.tell("go")
    assert agent.wait(PATIENCE_SECONDS) == 0


def test_a_failed_run_is_not_started_again_by_itself(gang: Gang) -> None:
    gang.launch('say("ready")')
    gang.run.mark("FATAL", "earlier")
    assert gang.finish() == 2
    assert "craton resume run" in gang.errors()
    assert not (gang.folder / "ready-0").exists()


def test_a_sink_that_fails_does_not_hurt_the_run(gang: Gang) -> None:
    gang.launch('wait_for("go")', track=["smoke-signals"])
    agent = gang.start()
    wait_until(lambda: "sink_failed" in gang.event_names(), "the failed sink is reported")
    gang.tell("go")
    assert agent.wait(PATIENCE_SECONDS) == 0
    assert gang.run.has("DONE")
    assert "no tracker named 'smoke-signals'; allowed: tensorboard, wandb, mlflow" in gang.errors()


def test_a_taken_metrics_port_is_replaced_out_loud(gang: Gang) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gang.launch("", metrics_port=taken.getsockname()[1])
        assert gang.finish() == 0
    assert "using any free port" in gang.errors()
    served = next(line for line in gang.events() if line["event"] == "metrics_served")
    assert served["port"] > 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read (Expecting property name"),
        ("[]", "holds a list, not a JSON object"),
        ('{"generation": 1}', "'nodes' is missing"),
        ('{"generation": 1, "nodes": ["a"], "ranks_per_node": 1, "command": ["x"], "rank": 1}', "'rank' is unknown"),
        ('{"generation": 1, "nodes": ["../a"], "ranks_per_node": 0, "command": ["x"]}', "ranks_per_node is 0"),
    ],
)
def test_a_bad_launch_file_fails_the_run_at_once(gang: Gang, text: str, said: str) -> None:
    gang.run.launch_path.write_text(text)
    assert gang.finish() == 2
    assert said in gang.errors()
    assert "launch.json" in gang.run.marker_text("FATAL")
    assert summarize(gang.run).state == "failed"


def test_a_node_that_the_launch_does_not_name(gang: Gang) -> None:
    gang.launch("")
    assert gang.finish(node=1) == 2
    assert "has 1 node, counted from 0" in gang.errors(1)
    assert not gang.run.has("FATAL")


def test_an_agent_does_not_start_with_an_empty_secret(gang: Gang) -> None:
    gang.launch('say("ready")')
    gang.run.secret_path.write_bytes(b"")
    assert gang.finish() == 2
    assert "remove it while the run is stopped" in gang.errors()
    assert "remove it while the run is stopped" in gang.run.marker_text("FATAL")
    assert not (gang.folder / "ready-0").exists()
