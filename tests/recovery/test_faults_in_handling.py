"""Faults where faults are handled: agents, keepers, coordinators, copies, networks and mounts."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rehearsed import (
    LAYOUTS,
    check_ledger,
    events,
    expect_same_end,
    finish,
    losses,
    processes_of,
    running,
    shared_memory,
    shrunk_and_grown,
    undisturbed,
    wait_until,
)

from craton.agent import Launch, write_launch
from craton.bench.recovery.rehearsal import Rehearsal, end_rehearsal, write_rehearsal
from craton.telemetry import RunDirectory

STEPS = 30
FSDP = LAYOUTS["fsdp"]


@pytest.mark.slow
def test_the_agent_the_keeper_and_the_coordinator_are_killed(runs: Path) -> None:
    expected, before = undisturbed(runs, "fsdp", STEPS), shared_memory()
    chaos = ("kill agent=node-1@step=8", "kill keeper=node-0@step=16", "kill coordinator@step=24")
    with running(runs, Rehearsal("killed-agents", steps=STEPS, chaos=chaos, **FSDP)) as run:
        expect_same_end(run, expected, before, interval=2)  # a keeper takes the newest copy of its node with it
        assert [event["fault"] for event in events(run, "chaos_fired")] == list(chaos)
        assert any(event["takes_over"] for event in events(run, "coordinates"))


@pytest.mark.slow
def test_two_ranks_at_once_and_then_everything_that_holds_a_copy(runs: Path) -> None:
    expected, before = undisturbed(runs, "fsdp", STEPS), shared_memory()
    chaos = (
        *("kill rank=0@step=9", "kill rank=3@step=9"),
        *("kill keeper=node-0@step=25", "kill keeper=node-1@step=25"),
    )
    with running(runs, Rehearsal("two-at-once", steps=STEPS, chaos=chaos, **FSDP)) as run:
        expect_same_end(run, expected, before)
        told = [event["restored_from"] for event in events(run, "recovered")]
        assert told[0] == "peer"
        assert "shared" in told[1:], told  # neither the node's memory nor its buddy's was there any more


@pytest.mark.slow
def test_an_agent_that_is_stopped_is_replaced(runs: Path) -> None:
    expected, before = undisturbed(runs, "fsdp", STEPS), shared_memory()
    with running(runs, Rehearsal("stopped-agent", steps=STEPS, **FSDP)) as run:
        wait_until(lambda: max(losses(run), default=0) >= 8, "8 steps", run)
        agent = next(event["pid"] for event in events(run, "agent_started") if event["node"] == "node-1")
        os.kill(agent, signal.SIGSTOP)
        wait_until(lambda: events(run, "agent_fenced"), "the other agent misses it", run)
        expect_same_end(run, expected, before)
        assert "node-1 is lost: no heartbeat" in events(run, "generation_started")[-1]["reason"]


@pytest.mark.slow
def test_a_full_shared_memory_mount_costs_the_tier_and_not_the_run(runs: Path, small_disk: Path) -> None:
    expected, before = undisturbed(runs, "fsdp", STEPS), shared_memory()
    chaos = ("kill rank=2@step=24",)
    environment = {"CRATON_SHARED_MEMORY": str(small_disk)}
    rehearsal = Rehearsal("full-mount", steps=STEPS, chaos=chaos, environment=environment, **FSDP)
    with running(runs, rehearsal) as run:
        expect_same_end(run, expected, before, interval=None)
        assert "has no space" in events(run, "peer_off")[0]["reason"]
        assert [event["restored_from"] for event in events(run, "recovered")] == ["shared"]


@pytest.mark.slow
def test_a_run_that_breaks_at_the_same_step_stops_with_the_reason(runs: Path) -> None:
    chaos = ["fail rank=1@step=10"] * 6
    with running(runs, Rehearsal("stubborn", steps=STEPS, chaos=chaos, **FSDP)) as run:
        wait_until(lambda: run.has("FATAL"), "the run gives up", run)
        wait_until(lambda: not processes_of(run), "its processes end", run)
        assert "injected failure at step 10" in run.marker_text("FATAL")
        assert "failure 4 in a row at step 10" in run.marker_text("FATAL")
        assert len(events(run, "generation_started")) == 4
        check_ledger(run)


@pytest.mark.slow
def test_a_spare_takes_the_place_of_a_lost_node(runs: Path) -> None:
    expected, before = undisturbed(runs, "fsdp", STEPS), shared_memory()
    chaos = ("lose-node node-1@step=12",)
    with running(runs, Rehearsal("spared", steps=STEPS, chaos=chaos, spares=1, **FSDP)) as run:
        expect_same_end(run, expected, before)
        assert events(run, "generation_started")[-1]["nodes"] == ["node-0", "node-2"]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 0], ids=["last", "first"])  # without the first, the ranks of the others change
def test_an_elastic_run_shrinks_and_grows_again(runs: Path, lost: int) -> None:
    steps = 6 * STEPS  # enough for a node to come back before the end, also on a busy machine
    expected = undisturbed(runs, "fsdp", steps)
    rehearsal = Rehearsal(
        f"elastic-{lost}",
        steps=steps,
        chaos=(f"lose-node node-{lost}@step=10",),
        min_nodes=1,
        layouts={1: {"fsdp": 2, "micro_batch": 4}},
        recover="{spare_wait: 1s}",
        **FSDP,
    )
    with shrunk_and_grown(runs, rehearsal, lost=lost, fewer=2) as run:
        grown = events(run, "generation_started")[-1]
        assert grown["world"] == 4
        assert grown["planned"]
        # other ranks sum in another order: what fp32 makes of that in a hundred steps
        assert losses(run)[steps] == pytest.approx(expected[steps], rel=1e-4)
        check_ledger(run)


@pytest.fixture
def two_networks() -> Iterator[list[str]]:
    """Two network namespaces with a cable between them."""
    names = [f"craton{os.getpid()}a", f"craton{os.getpid()}b"]
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and `ip`")
    commands = [
        *(["ip", "netns", "add", name] for name in names),
        ["ip", "link", "add", "craton-a", "netns", names[0], "type", "veth", "peer", "craton-b", "netns", names[1]],
    ]
    for side, name in enumerate(names):
        inside = ["ip", "-n", name]
        commands += [
            [*inside, "addr", "add", f"10.77.0.{side + 1}/24", "dev", f"craton-{'ab'[side]}"],
            [*inside, "link", "set", f"craton-{'ab'[side]}", "up"],
            [*inside, "link", "set", "lo", "up"],
        ]
    made = [subprocess.run(command, capture_output=True, text=True, check=False) for command in commands]
    try:
        if problems := [each.stderr for each in made if each.returncode]:
            pytest.skip(f"network namespaces cannot be made here: {problems[0].strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@contextmanager
def across(networks: list[str], runs: Path, rehearsal: Rehearsal) -> Iterator[RunDirectory]:
    """A run with a node in each network, at its 8th step."""
    run, launch = write_rehearsal(runs, rehearsal)
    write_launch(run, Launch(**{**launch.__dict__, "master_address": "10.77.0.1", "agent_command": []}))
    agents = [start_agent_in(name, run, number) for number, name in enumerate(networks)]
    try:
        wait_until(lambda: max(losses(run), default=0) >= 8, "8 steps", run)
        yield run
    finally:
        end_rehearsal(run)
        for agent in agents:
            agent.kill()
            agent.wait()


def set_cable(networks: list[str], way: str) -> None:
    """Pulls it out ("down"), or plugs it in again ("up")."""
    subprocess.run(["ip", "-n", networks[0], "link", "set", "craton-a", way], check=True)


def told_by(run: RunDirectory, node: str, event: str) -> list[dict[str, Any]]:
    return [each for each in events(run, event) if each["node"] == node]


@pytest.mark.slow
def test_a_network_that_is_cut_and_healed(runs: Path, two_networks: list[str]) -> None:
    expected, before = undisturbed(runs, "fsdp", STEPS), shared_memory()
    with across(two_networks, runs, Rehearsal("cut-network", steps=STEPS, **FSDP)) as run:
        set_cable(two_networks, "down")
        wait_until(lambda: told_by(run, "node-0", "waiting_for_nodes"), "one side notices the cut", run)
        wait_until(lambda: told_by(run, "node-1", "waiting_for_nodes"), "and so does the other", run)
        assert len(events(run, "generation_started")) == 1  # neither side goes on alone
        set_cable(two_networks, "up")
        expect_same_end(run, expected, before)


@pytest.mark.slow
def test_of_the_two_sides_of_a_cut_network_only_one_goes_on(runs: Path, two_networks: list[str]) -> None:
    steps = 6 * STEPS
    rehearsal = Rehearsal(
        "two-sides",
        steps=steps,
        min_nodes=1,
        layouts={1: {"fsdp": 2, "micro_batch": 4}},
        recover="{spare_wait: 1s}",
        **FSDP,
    )
    with across(two_networks, runs, rehearsal) as run:
        set_cable(two_networks, "down")
        wait_until(lambda: len(events(run, "generation_started")) == 2, "one side goes on", run)
        wait_until(lambda: told_by(run, "node-1", "coordinates_no_more"), "the other would, and may not", run)
        assert [event["node"] for event in events(run, "generation_started")] == ["node-0", "node-0"]
        assert not run.has("FATAL")
        set_cable(two_networks, "up")
        wait_until(lambda: len(events(run, "generation_started")) == 3, "it grows again", run)
        finish(run)
        assert sorted(losses(run)) == list(range(1, steps + 1))


@pytest.mark.slow
def test_a_stop_while_a_node_is_missing_ends_at_once(runs: Path) -> None:
    with running(runs, Rehearsal("stopped-waiting", steps=STEPS, chaos=("lose-node node-1@step=6",), **FSDP)) as run:
        wait_until(lambda: events(run, "waiting_for_nodes"), "it waits", run)
        run.mark("STOP", "craton stop")
        wait_until(lambda: not processes_of(run), "it stops", run)
        assert not run.has("FATAL"), run.marker_text("FATAL")


def start_agent_in(network: str, run: RunDirectory, number: int) -> subprocess.Popen[Any]:
    with open(run.path / "logs" / f"agent-node-{number}.log", "ab") as log:
        return subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                network,
                sys.executable,
                "-m",
                "craton.agent",
                str(run.path),
                "--node",
                str(number),
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "CRATON_ADDRESS": f"10.77.0.{number + 1}",
                "GLOO_SOCKET_IFNAME": f"craton-{'ab'[number]}",
            },
            start_new_session=True,
        )
