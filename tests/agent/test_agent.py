"""What a run on one or two nodes leaves behind when everything goes well, and how it is stopped."""

from __future__ import annotations

import json
import signal
import time
import urllib.request

import pytest
from agent_gang import Gang
from waiting import PATIENCE_SECONDS, wait_until

from craton.telemetry import summarize
from craton.telemetry.files import read_lines
from craton.telemetry.node import read_heartbeat, read_status

TRAIN = """
from craton.telemetry.rank import LedgerClock, Recorder
recorder, clock = Recorder.from_environment(), LedgerClock()
clock.switch("productive")
for step in range(1, 4):
    time.sleep(0.02)
    recorder.metrics(step, run_loss=3.0 / step, run_step_seconds=0.02)
    recorder.ledger(step, clock.take())
print("trained", RANK)
"""
STOPPABLE = """
def stop(number, frame):
    say("checkpointed")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
say("ready")
wait_for("never")
"""


def test_two_nodes_train_to_the_end(gang: Gang) -> None:
    gang.launch(TRAIN, nodes=["a", "b"], ranks_per_node=2)
    agents = [gang.start(0), gang.start(1)]
    assert [agent.wait(PATIENCE_SECONDS) for agent in agents] == [0, 0]

    assert gang.run.has("DONE")
    for node, ranks in (("a", {0, 1}), ("b", {2, 3})):
        lines, _ = read_lines(gang.run.metrics_path(node))
        of_ranks = [line for line in lines if line["rank"] is not None]
        assert {line["rank"] for line in of_ranks} == ranks
        assert len(of_ranks) == 6
        assert {(line["node"], line["generation"]) for line in lines} == {(node, 1)}
        assert all({"time", "step"} <= line.keys() for line in lines)
    assert gang.run.log_path(3).read_text() == "trained 3\n"
    summary = summarize(gang.run)
    assert (summary.state, summary.step, summary.loss, summary.ranks) == ("done", 3, 1.0, 4)
    assert summary.ledger.keys() == {"start", "productive", "idle"}


def test_the_kinds_of_a_rank_sum_to_the_life_of_its_place(gang: Gang) -> None:
    gang.launch(TRAIN)
    assert gang.finish() == 0
    lines, _ = read_lines(gang.run.ledger_path("node-0"))
    events = {line["event"]: line["time"] for line in gang.events()}
    life = events["agent_ended"] - events["agent_started"]
    booked = sum(sum(line["seconds"].values()) for line in lines)
    assert booked == pytest.approx(life, abs=0.2)
    assert lines[-1]["ended"] == "done"


def test_what_a_rank_finds_in_its_environment(gang: Gang) -> None:
    gang.launch(
        """
import json
say("environment", json.dumps(dict(os.environ)))
""",
        nodes=["a", "b"],
        ranks_per_node=2,
        env={"COLOUR": "blue"},
        master_address="10.0.0.1",
        master_port=12345,
        threads_per_rank=3,
        generation=7,
    )
    agents = [gang.start(0), gang.start(1)]
    assert [agent.wait(PATIENCE_SECONDS) for agent in agents] == [0, 0]
    environment = json.loads(gang.said("environment", 3))
    expected = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "12345",
        "OMP_NUM_THREADS": "3",
        "CRATON_RUN": str(gang.run.path),
        "CRATON_NODE": "b",
        "CRATON_GENERATION": "7",
        "COLOUR": "blue",
        "CUDA_VISIBLE_DEVICES": "",
    }
    assert {name: environment.get(name) for name in expected} == expected


def test_prometheus_sees_plan_and_run_side_by_side(gang: Gang) -> None:
    tiers = [{"tier": "shared", "every_seconds": 60.0}, {"tier": "nvme", "every_seconds": None}]
    plan = {"steps": 9, "step_seconds": 0.5, "step_seconds_high": 0.7, "phases": {"data": 0.1}}
    gang.run.plan_path.write_text(json.dumps({**plan, "storage": {"tiers": tiers}}))
    gang.launch(
        """
from craton.telemetry.rank import Recorder
recorder = Recorder.from_environment()
recorder.metrics(1, run_loss=2.5, run_skipped_steps=1, my_own=7)
recorder.event("checkpoint_saved", step=1, tier="shared")
say("recorded")
wait_for("go")
""",
        leaves={"node-0": "leaf-3"},
    )
    began = time.time()
    agent = gang.start()
    gang.said("recorded", 0)
    ports = wait_until(lambda: summarize(gang.run).metrics_ports, "the heartbeat names the port")

    def scrape() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{ports['node-0']}/metrics", timeout=PATIENCE_SECONDS) as answer:
            return str(answer.read().decode())

    labels = 'leaf="leaf-3",node="node-0",rank="{}",run="run"'
    rank, agent_itself = labels.format(0), labels.format("")
    booked = f'craton_run_ledger_seconds_total{{kind="productive",{rank}}}'
    text = wait_until(lambda: scrape() if booked in scrape() else "", "the books are served")
    assert f"craton_run_loss{{{rank}}} 2.5" in text
    assert f"craton_run_skipped_steps_total{{{rank}}} 1.0" in text
    assert f"craton_my_own{{{rank}}} 7.0" in text
    assert f"craton_plan_step_seconds{{{agent_itself}}} 0.5" in text
    assert f"craton_plan_data_seconds{{{agent_itself}}} 0.1" in text
    assert f"craton_plan_step_seconds_high{{{agent_itself}}} 0.7" in text
    assert f"craton_run_restarts_total{{{agent_itself}}} 0.0" in text
    of_a_tier = f'{{{agent_itself},tier="shared"}}'
    assert f"craton_plan_checkpoint_interval_seconds{of_a_tier} 60.0" in text
    assert "nvme" not in text  # a tier that nothing is saved to
    moment = float(text.partition(f"craton_run_checkpoint_moment_seconds{of_a_tier}")[2].split()[0])
    assert began <= moment <= time.time()
    assert float(text.partition(booked)[2].split()[0]) > 0
    assert f"craton_run_progress_age_seconds{{{rank}}}" in text
    status = wait_until(lambda: read_status(gang.run, "node-0"), "what the ranks do is written")
    assert [(each.rank, each.kind, each.is_stopped) for each in status.ranks] == [(0, "productive", False)]
    assert summarize(gang.run).state == "running"
    gang.tell("go")
    assert agent.wait(PATIENCE_SECONDS) == 0


def test_the_stop_marker_lets_ranks_checkpoint(gang: Gang) -> None:
    gang.launch(STOPPABLE, ranks_per_node=2)
    agent = gang.start()
    gang.said("ready", 0), gang.said("ready", 1)
    assert summarize(gang.run).state in ("starting", "running")  # until its agent has told what its ranks do
    gang.run.mark("STOP", "asked by a test")
    assert summarize(gang.run).state in ("stopping", "stopped")
    assert agent.wait(PATIENCE_SECONDS) == 0
    gang.said("checkpointed", 0), gang.said("checkpointed", 1)
    assert not gang.run.has("DONE")
    assert summarize(gang.run).state == "stopped"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_agent_stops_all_nodes(gang: Gang, number: signal.Signals) -> None:
    gang.launch(STOPPABLE, nodes=["a", "b"])
    agents = [gang.start(0), gang.start(1)]
    gang.said("ready", 0), gang.said("ready", 1)
    agents[1].send_signal(number)
    assert [agent.wait(PATIENCE_SECONDS) for agent in agents] == [0, 0]
    gang.said("checkpointed", 0), gang.said("checkpointed", 1)
    assert gang.run.marker_text("STOP") == f"{number.name} to the agent of b\n"
    assert summarize(gang.run).state == "stopped"


def test_a_rank_stopped_before_it_can_listen_has_not_failed(gang: Gang) -> None:
    gang.launch('say("ready"); wait_for("never")')
    agent = gang.start()
    gang.said("ready", 0)
    gang.run.mark("STOP")
    assert agent.wait(PATIENCE_SECONDS) == 0
    assert summarize(gang.run).state == "stopped"
    assert not gang.run.has("FATAL")


def test_a_stopped_run_goes_on_with_the_next_generation(gang: Gang) -> None:
    gang.launch(STOPPABLE)
    agent = gang.start()
    gang.said("ready", 0)
    gang.run.mark("STOP")
    assert agent.wait(PATIENCE_SECONDS) == 0
    assert gang.finish() == 0  # told to stop: nothing to start
    gang.run.unmark("STOP")
    gang.launch(TRAIN, generation=2, ranks_per_node=2)
    assert gang.finish() == 0
    assert gang.run.log_path(0).read_text() == "trained 0\n"
    beat = read_heartbeat(gang.run, "node-0")
    assert beat is not None
    assert (beat.generation, beat.state) == (2, "done")
    generations = {line["generation"] for line in gang.events()}
    assert generations == {1, 2}


def test_tensorboard_is_fed_while_the_run_goes_on(gang: Gang) -> None:
    pytest.importorskip("tensorboard")
    gang.launch(TRAIN, track=["tensorboard"])
    assert gang.finish() == 0
    assert list((gang.run.path / "tensorboard").glob("events.*"))
    assert "sink_failed" not in gang.event_names()
