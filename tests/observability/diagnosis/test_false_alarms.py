"""Where an alarm over nothing, or blame on somebody else, is near: odd single steps, cards of other jobs, mounts that
the run does not use, machines of the same name, and a clock that is off.
"""

from __future__ import annotations

import math
import os
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_snapshots import (
    healthy,
    hung,
    slowed,
    with_gpu,
    with_node,
    with_nodes,
    with_rank,
    with_run,
    without_hardware,
)

from craton.infrastructure.probes import xid_facts
from craton.observability.diagnosis import diagnose
from craton.observability.diagnosis.collect import ask_prometheus
from craton.observability.diagnosis.collect.clocks import moment_for
from craton.observability.diagnosis.collect.file_systems import paths_of, with_holders
from craton.observability.diagnosis.collect.metrics import Steps
from craton.observability.diagnosis.collect.processes import visible_cards
from craton.observability.diagnosis.collect.scheduler import node_words
from craton.observability.diagnosis.snapshot import (
    CardOccupant,
    Collectives,
    Communicator,
    Snapshot,
    SnapshotMount,
    SnapshotXid,
    with_occupants,
    with_visible_cards,
)
from craton.telemetry import RunDirectory
from craton.telemetry.node import Heartbeat, touch_heartbeat, write_heartbeat

NAME = "run_rank_gradient_norm"


def steps_of(norms: list[float | None]) -> Steps:
    return Steps("a", [{"time": float(step), "step": step, NAME: norm} for step, norm in enumerate(norms)])


# -- gradients -----------------------------------------------------------------------------------------------------


def test_one_odd_step_is_nobody_s_fault_and_most_of_the_newest_are() -> None:
    usual: list[float | None] = [0.4] * 40
    once, lasting = steps_of([*usual, 9.0]), steps_of([*usual, 9.0, 9.0, 0.4, 9.0, 9.0])
    assert (once.lasting(NAME), once.usual(NAME)) == (0.4, 0.4)
    assert (lasting.lasting(NAME), lasting.usual(NAME)) == (9.0, 0.4)
    assert steps_of([*usual, None]).lasting(NAME) == 0.4
    assert math.isnan(steps_of([*usual, None, None, None]).lasting(NAME) or 0.0)
    assert steps_of([9.0, 9.0]).lasting(NAME) is None


def test_a_norm_alone_is_a_hint_and_a_checksum_is_proof() -> None:
    hint = diagnose(with_rank(healthy(4), 11, gradient_norm=60.0))
    proof = diagnose(with_rank(healthy(4), 11, differs_from_copies=True))
    assert hint.cause == proof.cause == "gpu_computes_wrong"
    assert (hint.health, proof.health) == ("observe", "")
    assert hint.confidence < proof.confidence - 0.05


# -- what the driver and NVIDIA's table ask for --------------------------------------------------------------------


@pytest.mark.parametrize("code", [48, 54, 64, 74, 79, 94, 95, 119, 168])
def test_the_table_of_xids_says_what_a_card_needs(code: int) -> None:
    run = hung(healthy(4), {11: "productive"})
    verdict = diagnose(with_gpu(run, "node-1", 3, xids=(SnapshotXid(code, run.moment - 5),)))
    assert verdict.layer in ("device", "fabric")
    assert verdict.health == xid_facts()[code].action


def test_the_driver_s_own_word_wins_over_the_table() -> None:
    run = hung(healthy(4), {11: "productive"})
    told = (SnapshotXid(48, run.moment - 5), SnapshotXid(154, run.moment - 4, recovery="Node Reboot Required"))
    assert diagnose(with_gpu(run, "node-1", 3, xids=told)).health == "reboot"
    assert diagnose(with_gpu(healthy(4), "node-1", 3, recovery_action="Reset")).health == "reset"


def test_an_nvlink_error_counts_when_it_says_that_it_is_fatal() -> None:
    run = hung(healthy(4), {11: "productive"})
    mild, fatal = (SnapshotXid(149, run.moment - 5, is_fatal=is_fatal) for is_fatal in (False, True))
    assert diagnose(with_gpu(run, "node-1", 3, xids=(mild,))).cause != "nvlink_errors"
    verdict = diagnose(with_gpu(run, "node-1", 3, xids=(fatal,)))
    assert (verdict.cause, verdict.health) == ("nvlink_errors", "reboot")


def test_what_only_ends_a_job_is_no_risk_for_a_healthy_one() -> None:
    run = healthy(4)
    assert not diagnose(with_gpu(run, "node-1", 3, xids=(SnapshotXid(94, run.moment - 5),))).is_alarm
    assert diagnose(with_gpu(run, "node-1", 3, xids=(SnapshotXid(48, run.moment - 5),))).health == "reset"


# -- names of machines ---------------------------------------------------------------------------------------------


def row(value: float, **labels: str) -> dict[str, Any]:
    return {"metric": labels, "value": [0.0, str(value)]}


def asked(snapshot: Snapshot, answers: Mapping[str, list[dict[str, Any]]]) -> Snapshot:
    return ask_prometheus(snapshot, "http://nowhere", lambda expression: answers.get(expression, []))[0]


def test_a_host_named_as_another_node_of_the_run_is_that_host() -> None:
    run = without_hardware(healthy(2, 4))
    crossed = replace(
        run, nodes=tuple(replace(n, host_name=h) for n, h in zip(run.nodes, ("node-1", "node-0"), strict=True))
    )
    held = {"craton_gpu_clocks_held == 1": [row(1, node="node-1", gpu="0", reason="hw_thermal_slowdown")]}
    seen = asked(crossed, held)
    assert [[gpu.throttle for gpu in node.gpus] for node in seen.nodes] == [[("hw_thermal_slowdown",)], []]


def test_a_foreign_machine_that_bears_the_name_of_a_node_is_not_taken_for_it() -> None:
    run = with_nodes(without_hardware(healthy(2, 4)), lambda node: replace(node, host_name=f"gpu-{node.name}.x.y"))
    load = [row(7.0, node="gpu-node-1"), row(500.0, node="node-0"), row(900.0, run_node="node-1", node="other")]
    seen = asked(run, {"node_load1": load})
    assert [node.host and node.host.load for node in seen.nodes] == [None, 7.0]


def test_slurm_s_words_are_of_hosts() -> None:
    words = node_words("gpu-17|down*|Not responding\nnode-1|down|x\n", {"node-0": "gpu-17", "node-1": "gpu-18"})
    assert [(word.node, word.is_bad) for word in words] == [("node-0", True)]


# -- cards ---------------------------------------------------------------------------------------------------------


def shared_node() -> Snapshot:
    """Four ranks on a node of eight cards, of which the first four are somebody else's, and one of those is hot."""
    run = slowed(healthy(1, 4), {2: 1.4})
    cards = tuple(replace(run.nodes[0].gpus[0], index=index, uuid=f"GPU-{index}") for index in range(8))
    run = with_node(run, "node-0", gpus=cards)
    return with_gpu(run, "node-0", 2, throttle=("hw_thermal_slowdown",), sm_clock_mhz=900.0)


def test_the_exporter_tells_which_cards_are_the_run_s() -> None:
    others = [row(1e9, node="node-0", gpu=str(card), run="other", rank=str(card)) for card in range(4)]
    own = [row(1e9, node="node-0", gpu=str(4 + rank), run="llama-8b", rank=str(rank)) for rank in range(4)]
    seen = asked(shared_node(), {"craton_gpu_rank_memory_bytes": [*others, *own]})
    assert [gpu.index for gpu in seen.nodes[0].gpus] == [4, 5, 6, 7]
    assert [rank.gpu for rank in seen.ranks] == [4, 5, 6, 7]
    assert diagnose(shared_node()).cause == "gpu_throttled"
    assert diagnose(seen).cause != "gpu_throttled"


def test_the_card_of_a_rank_that_died_is_not_lost() -> None:
    run = healthy(1, 4)
    own = [CardOccupant("node-0", card, "llama-8b", card) for card in (0, 1, 3)]
    assert [gpu.index for gpu in with_occupants(run, own).nodes[0].gpus] == [0, 1, 2, 3]


@pytest.mark.parametrize("visible", ["4,5,6,7", "GPU-4,GPU-5,GPU-6,GPU-7"])
def test_cards_that_a_launch_names(visible: str) -> None:
    seen = with_visible_cards(shared_node(), {"node-0": visible})
    assert [gpu.index for gpu in seen.nodes[0].gpus] == [rank.gpu for rank in seen.ranks] == [4, 5, 6, 7]


def test_a_rank_s_environment_names_its_cards() -> None:
    limits = {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_JOB_GPUS": "4,5"}
    environment = {**os.environ, **limits}
    rank = subprocess.Popen(["cat"], env=environment, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert rank.stdin is not None
        assert rank.stdout is not None
        rank.stdin.write(b".")
        assert rank.stdout.read(1) == b"."  # it is what it will be
        assert visible_cards(rank.pid) == "4,5"
    finally:
        rank.kill()
        rank.communicate()
    assert visible_cards(rank.pid) == ""


def test_nobody_is_blamed_for_a_card_that_nobody_places() -> None:
    assert [rank.gpu for rank in with_visible_cards(shared_node(), {}).ranks] == [None] * 4
    assert with_visible_cards(healthy(2, 4), {}) == healthy(2, 4)


# -- file systems --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mount",
    [
        SnapshotMount("/boot/efi", "vfat", full_share=0.99),
        SnapshotMount("/run/user/1000/doc", "fuse.portal", is_stalled=True),
        SnapshotMount("/var/lib/docker", "ext4", full_share=1.0),
    ],
)
def test_file_systems_of_the_machine_are_not_the_run_s(mount: SnapshotMount) -> None:
    run = with_nodes(healthy(2), lambda node: replace(node, mounts=(*node.mounts, mount)))
    assert not diagnose(run).is_alarm


def test_only_the_folders_of_a_job_count_where_they_are_known() -> None:
    paths = {"run": ("/fsx/runs/x",), "data": ("/fsx/data",), "checkpoints": ("/scratch/x",)}
    home, scratch = SnapshotMount("/home", "nfs", is_stalled=True), SnapshotMount("/scratch", "xfs", full_share=1.0)

    def seen(*mounts: SnapshotMount) -> Snapshot:
        run = with_run(healthy(2), paths=paths)
        return with_nodes(run, lambda node: replace(node, mounts=with_holders((*node.mounts, *mounts), paths)))

    assert not diagnose(seen(home)).is_alarm
    assert diagnose(seen(SnapshotMount("fsx", "lustre", is_stalled=True))).cause == "storage_stalled"
    assert diagnose(seen(home, scratch)).cause == "storage_full"


def test_where_a_job_says_its_files_are(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "made")
    assert paths_of(run, "slurm") == {"run": (str(run.path),)}
    run.job_path.write_text(
        "name: made\nkind: pretrain\n"
        "model: {name: tiny, layers: 2, hidden: 64, ffn_hidden: 128, heads: 2, vocab: 256}\n"
        "data: {path: /fsx/tokens, sequence: 64}\ntrain: {global_batch_sequences: 4, steps: 2}\ncluster: local\n"
        "checkpoint: {tiers: [{to: /scratch/saves, every_steps: 1}]}\n",
        encoding="utf-8",
    )
    expected = {"run": (str(run.path),), "data": ("/fsx/tokens",), "checkpoints": ("/scratch/saves/made",)}
    assert paths_of(run, "slurm") == expected
    assert paths_of(run, "kubernetes") == {}


# -- collectives and clocks ----------------------------------------------------------------------------------------


def test_ranks_of_a_part_of_the_world_are_not_those_of_the_run() -> None:
    run = hung(healthy(2, 8), {})
    part = Communicator("0x2", 4, {0: 5, 1: 9, 2: 9, 3: 9}, {0: 5, 1: 9, 2: 9, 3: 9}, 2.0)
    verdict = diagnose(replace(run, collectives=Collectives((part,), ras_asked=True)))
    assert (verdict.cause, verdict.rank) == ("cannot_tell", None)


def beating(root: Path, host: str, age: float) -> RunDirectory:
    run = RunDirectory.create(root, "beats")
    write_heartbeat(run, "a", Heartbeat(0, "running", 1, 0, host=host))
    os.utime(run.heartbeat_path("a"), (time.time() - age, time.time() - age))
    return run


def test_a_clock_that_is_off_makes_nobody_dead(tmp_path: Path) -> None:
    run = beating(tmp_path, "elsewhere", 0.0)
    done = threading.Event()

    def beat() -> None:
        while not done.wait(0.1):
            touch_heartbeat(run, "a")

    agent = threading.Thread(target=beat)
    agent.start()
    try:
        ahead = moment_for(run, ["a"], time.time() + 35.0)
        behind = moment_for(run, ["a"], time.time() - 35.0)
    finally:
        done.set()
        agent.join()
    now = time.time()
    assert abs(ahead - now) < 5.0
    assert abs(behind - now) < 5.0


def test_who_does_not_beat_stays_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("craton.observability.diagnosis.collect.clocks.BEAT_SECONDS", 0.5)
    run = beating(tmp_path, "elsewhere", 30.0)
    now = time.time()
    assert moment_for(run, ["a"], now) >= now
    assert moment_for(run, [], now) == now
