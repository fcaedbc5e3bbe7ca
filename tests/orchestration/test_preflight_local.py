"""Pre-flight of runs on this machine: a bad card stops the start with what to do, and a run without GPUs waits for
nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from infrastructure.node_images import HEALTHY, Node

from craton.agent import Launch
from craton.api import run
from craton.infrastructure.probes import NodeRoot
from craton.job import parse_job
from craton.orchestration import StartError
from craton.orchestration.preflight import check_local
from craton.orchestration.watching import wait_for_agents
from craton.telemetry import RunDirectory, list_runs
from craton.telemetry.files import read_lines

COMMAND = "name: mine\nkind: command\ncommand: ['true']\ncluster: local x {nodes}\n"


def checked(node: Node, launch: Launch, folder: Path) -> RunDirectory:
    directory = RunDirectory.create(folder / "runs", "mine")
    job = parse_job(COMMAND.format(nodes=len(launch.nodes)), "job.yaml")
    check_local(directory, job, launch, NodeRoot(node.write(folder / "node")))
    return directory


def bad_second_card() -> Node:
    node = HEALTHY["lab-h100"]()
    node.cards[1].xml["remapped_rows/remapped_row_failure"] = "Yes"
    node.log.append("[ 42.0] NVRM: Xid (PCI:0000:63:00): 64, Row Remapper: failed")
    return node


def test_a_healthy_machine_is_an_event_of_every_node(tmp_path: Path) -> None:
    node = HEALTHY["lab-h100"]()
    node.limits["locked memory"] = "65536"  # nothing of this run goes over the network
    node.environment["NCCL_SOCKET_IFNAME"] = "lo"
    cards = {f"node-{number}": f"{2 * number},{2 * number + 1}" for number in range(2)}
    directory = checked(node, Launch(3, list(cards), 2, ["true"], gpus=True, cards=cards), tmp_path)
    for name in cards:
        (event,) = read_lines(directory.events_path(name))[0]
        assert (event["event"], event["generation"], event["worst"]) == ("preflight", 3, "note")
        assert {each["what"] for each in event["findings"]} >= {"locked_memory", "environment"}
        assert event["checks"] > 10


def test_a_bad_card_stops_the_start_of_the_run_that_would_use_it(tmp_path: Path) -> None:
    launch = Launch(0, ["node-0"], 2, ["true"], env={"CUDA_VISIBLE_DEVICES": "0,1"}, gpus=True)
    with pytest.raises(StartError, match=r"GPU 1 .*rows could not be remapped.*drain and replace the node"):
        checked(bad_second_card(), launch, tmp_path)


@pytest.mark.parametrize("visible", ["0,2", "GPU-000053000,GPU-000073000"])
def test_a_bad_card_that_the_run_does_not_see_is_not_its_business(visible: str, tmp_path: Path) -> None:
    launch = Launch(0, ["node-0"], 2, ["true"], env={"CUDA_VISIBLE_DEVICES": visible}, gpus=True)
    directory = checked(bad_second_card(), launch, tmp_path)
    (event,) = read_lines(directory.events_path("node-0"))[0]
    assert event["worst"] in ("ok", "note")


def test_fewer_processes_than_gpus_still_need_all_gpus(tmp_path: Path) -> None:
    node = HEALTHY["lab-h100"]()
    node.hidden_cards.append(node.cards.pop().bus)
    launch = Launch(0, ["node-0"], 1, ["true"], gpus=True, gpus_per_node=8)
    with pytest.raises(StartError, match="7 of 8 GPUs"):
        checked(node, launch, tmp_path)


def test_a_command_may_bring_its_own_torch(tmp_path: Path) -> None:
    node = HEALTHY["lab-h100"]()
    node.packages["torch"] = "2.11.0+cpu"
    launch = Launch(0, ["node-0"], 8, ["true"], gpus=True)
    directory = checked(node, launch, tmp_path)
    (event,) = read_lines(directory.events_path("node-0"))[0]
    assert {each["what"]: each["severity"] for each in event["findings"]}["torch"] == "note"


def test_a_run_without_gpus_asks_no_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = tmp_path / "asked"
    for name in ("nvidia-smi", "fi_info", "ldconfig", "dmesg", "chronyc", "timedatectl", "lnetctl", "lctl"):
        tool = tmp_path / "tools" / name
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f"#!/bin/sh\necho {name} >> {asked}\nexec sleep 86400\n", encoding="utf-8")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}:/usr/bin:/bin")
    directory = RunDirectory.create(tmp_path / "runs", "mine")
    launch = Launch(0, [f"node-{number}" for number in range(8)], 1, ["true"])
    check_local(directory, parse_job(COMMAND.format(nodes=8), "job.yaml"), launch)
    assert not asked.exists()
    events = [read_lines(directory.events_path(name))[0] for name in launch.nodes]
    assert [(event["event"], event["checks"] >= 3) for (event,) in events] == [("preflight", True)] * 8


def test_craton_run_makes_the_check_before_it_starts_anything(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    directory = run(parse_job(COMMAND.format(nodes=1), "job.yaml")).directory
    wait_for_agents(directory, 30.0)
    first, *others = read_lines(directory.events_path("node-0"))[0]
    assert first["event"] == "preflight"
    assert "preflight" not in {each["event"] for each in others}


def test_craton_run_refuses_a_machine_with_a_bad_card(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = bad_second_card().write(tmp_path / "node")
    tool = tmp_path / "tools" / "nvidia-smi"
    tool.parent.mkdir()
    listed = "".join(f"{number}, GPU-{number}, NVIDIA H100 80GB HBM3, 81559\\n" for number in range(8))
    tool.write_text(
        f"#!/bin/sh\ncase $1 in --query*) printf '{listed}';; -q) cat {image}/commands/nvidia-smi.txt;; "
        f"*) cat {image}/commands/nvlink.txt;; esac\n",
        encoding="utf-8",
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(StartError, match=r"failed pre-flight: .*rows could not be remapped"):
        run(parse_job(COMMAND.format(nodes=1), "job.yaml"))
    assert list_runs(root) == []  # nothing has run: the name is free again
