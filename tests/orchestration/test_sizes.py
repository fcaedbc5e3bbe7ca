"""An elastic job is planned on every number of nodes it may run on; what cannot be trained is left out and told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from craton.agent import Launch
from craton.agent.coordination import Coordinator, Release
from craton.job import parse_job
from craton.orchestration import StartError
from craton.orchestration.changes import faults_left
from craton.orchestration.changes.resize import among_nodes, with_nodes
from craton.orchestration.draft import draft_run
from craton.orchestration.local import check_machine
from craton.orchestration.start.runs import resumed_job
from craton.telemetry import RunDirectory
from craton.telemetry.rank import Recorder

RUN = Path("/runs/small")
JOB = """\
name: small
kind: pretrain
model: {name: tiny, layers: 2, hidden: 32, ffn_hidden: 64, heads: 2, vocab: 300}
data: {sequence: 128}
train: {global_batch_sequences: 32, steps: 100}
cluster: local x 2..8
"""
FIXED = JOB.replace("2..8", "8")


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_every_possible_size_has_its_layout_and_its_plan() -> None:
    draft = draft_run(parse_job(JOB), RUN)
    launch = draft.launch
    assert (launch.min_nodes, launch.num_nodes, len(launch.nodes)) == (2, 8, 8)
    assert list(launch.layouts) == ["2", "4", "8"]
    for count, layout in launch.layouts.items():
        assert layout["replicate"] * layout["fsdp"] == int(count)
    files = draft.files()
    assert {name for name in files if name.startswith("plans/")} == {"plans/2.json", "plans/4.json", "plans/8.json"}
    plans = {count: json.loads(files[f"plans/{count}.json"]) for count in (2, 4, 8)}
    assert {count: found["layout"] for count, found in plans.items()} == {
        int(count): layout for count, layout in launch.layouts.items()
    }
    assert json.loads(files["plan.json"]) == plans[8]
    nodes = [found["cluster"]["instance"] for found in plans.values()]
    assert nodes[0] == nodes[1] == nodes[2], "a node does not grow when others are lost"
    assert "not on 3, 5, 6, 7 nodes: no layout divides the job: 32 sequences per step on 3 GPUs" in draft.note


def test_a_job_that_cannot_shrink_says_so() -> None:
    draft = draft_run(parse_job(JOB.replace("2..8", "3..4")), RUN)
    assert (draft.launch.min_nodes, draft.launch.layouts, draft.sizes) == (0, {}, [])
    assert "not elastic: fewer than 4 nodes cannot train this job" in draft.note
    assert "plans/4.json" not in draft.files()


def test_the_layout_that_was_written_holds_for_every_size() -> None:
    draft = draft_run(parse_job(JOB + "layout: {fsdp: 2}\n"), RUN)
    assert {count: (each["fsdp"], each["replicate"]) for count, each in draft.launch.layouts.items()} == {
        "2": (2, 1),
        "4": (2, 2),
        "8": (2, 4),
    }


def test_a_job_that_is_not_elastic_has_one_size() -> None:
    draft = draft_run(parse_job(JOB.replace("2..8", "4")), RUN)
    assert (draft.launch.min_nodes, draft.launch.num_nodes, draft.launch.layouts, draft.note) == (0, 4, {}, "")


def test_a_model_that_is_a_function_shrinks_to_what_shares_its_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_models.py").write_text("def build() -> None: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    text = JOB.replace("{name: tiny, layers: 2, hidden: 32, ffn_hidden: 64, heads: 2, vocab: 300}", "my_models:build")
    draft = draft_run(parse_job(text), RUN)
    assert {count: layout["fsdp"] for count, layout in draft.launch.layouts.items()} == {"2": 2, "4": 4, "8": 8}


def test_a_command_runs_on_any_number() -> None:
    draft = draft_run(parse_job("kind: command\ncommand: train\ncluster: local x 2..4\n"), RUN)
    assert draft.launch.layouts == {"2": {}, "3": {}, "4": {}}
    assert draft.launch.nursery == []


def test_spares_stand_beside_the_nodes_that_work() -> None:
    draft = draft_run(parse_job(JOB.replace("2..8", "2") + "recover: {spares: 1, tries: 5, spare_wait: 4s}\n"), RUN)
    launch = draft.launch
    assert (launch.nodes, launch.num_nodes, draft.num_ranks) == (["node-0", "node-1", "node-2"], 2, 2)
    assert (launch.tries, launch.spare_seconds, launch.give_up_seconds) == (5, 4.0, 600.0)
    assert launch.agent_command[-3:] == ["craton.agent", "/runs/small", "--node"]
    assert launch.nursery[-2:] == ["craton.ml.fork_server", "/runs/small"]


def test_chaos_of_the_job_is_checked_against_its_nodes() -> None:
    job = parse_job(FIXED + "chaos: {random: 6, seed: 3}\n")
    assert draft_run(job, RUN).launch.chaos == draft_run(job, RUN).launch.chaos
    assert len(draft_run(job, RUN).launch.chaos) == 6
    written = draft_run(parse_job(FIXED + "chaos: [kill rank=7@step=3, corrupt tier=peer@step=9]\n"), RUN)
    assert written.launch.chaos == ["kill rank=7@step=3", "corrupt tier=peer@step=9"]
    refused = {
        "kill rank=8@step=3": "job.yaml:7: .*the ranks are 0 to 7",
        "corrupt tier=nvme@step=3": "it has peer, shared",
        "kill rank=1@step=101": "ends after step 100",
        "lose-node node-8": "there is no node node-8",
    }
    for text, words in refused.items():
        with pytest.raises(StartError, match=words):
            draft_run(parse_job(FIXED + f"chaos: [{text}]\n"), RUN)


def test_a_resume_keeps_the_size_that_was_asked_for_last(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "small")
    for before, after in {
        "local x 2": "local x 4",
        "local x 2..8": "local x 2..4",
        "local x 6..8": "local x 4",
    }.items():
        run.job_path.write_text(JOB.replace("local x 2..8", before))
        run.resize_path.write_text(json.dumps({"nodes": 4, "layout": {}, "time": 1.0}))
        assert str(resumed_job(run).cluster) == after
        assert str(resumed_job(run, "local x 1").cluster) == "local x 1"
        run.resize_path.unlink()
        assert str(resumed_job(run).cluster) == before


def test_a_larger_run_names_more_nodes_and_keeps_its_spares() -> None:
    launch = draft_run(parse_job(JOB.replace("2..8", "2") + "recover: {spares: 1}\n"), RUN).launch
    grown = with_nodes(launch, 4)
    assert (grown.nodes, grown.num_nodes) == ([f"node-{number}" for number in range(5)], 4)
    assert with_nodes(grown, 2) == grown, "who works now may be any of them"


def let_go(launch: Launch) -> list[str]:
    """Nodes that end when such a run was made smaller, to two nodes, and goes on."""
    coordinator = Coordinator(launch, "node-0", None, 0, 0.0)
    coordinator.resize(2, {})
    released: list[str] = []
    for now in range(10):
        for node in launch.nodes:
            busy = coordinator.current.ranks_of(node) if coordinator.current else ()
            ranks = dict.fromkeys(busy, ("productive", now, 0.0, 1.0, False, 0))
            coordinator.heard(node, {"ready": True, "generation": 0, "ranks": ranks}, now)
        for action in coordinator.tick(now, now):
            released += action.nodes if isinstance(action, Release) else ()
    return released


def test_on_a_cluster_a_smaller_run_keeps_its_nodes_as_spares() -> None:
    launch = Launch(0, [f"node-{number}" for number in range(4)], 1, ["true"], min_nodes=3)
    smaller = among_nodes(launch, 2)
    assert (smaller.nodes, smaller.working_nodes, smaller.min_nodes) == (launch.nodes, 2, 2)
    assert let_go(launch) == ["node-2", "node-3"], "as on one machine, where they can be started again"
    assert let_go(smaller) == []
    assert among_nodes(smaller, 4).working_nodes == 4, "and it may grow again"


def test_chaos_that_happened_does_not_happen_again_after_a_resume(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "small")
    job = parse_job(FIXED)
    before = draft_run(job, RUN).launch
    asked = ["kill rank=7@step=3", "hang rank=0@step=50", "corrupt tier=peer@step=40", "kill rank=1@step=60"]
    recorder = Recorder("node-0", 0, generation=0, run=run)
    recorder.event("chaos_fired", fault="hang rank=0@step=50")
    recorder.event("chaos_fired", fault="corrupt tier=peer@step=40: rank 1 of node-0")
    recorder.close()
    launch = replace(before, chaos=asked)
    assert faults_left(run, job, launch, before, 2) == ["kill rank=7@step=3", "kill rank=1@step=60"]
    assert faults_left(run, job, launch, before, 30) == ["kill rank=1@step=60"]
    smaller = replace(before, num_nodes=1)
    assert faults_left(run, job, launch, smaller, 2) == []


def test_a_spare_needs_a_gpu_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 0, GPU-aaaa, NVIDIA H100 80GB HBM3, 81559\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    job = parse_job("kind: command\ncommand: train\ncluster: local x 1\nrecover: {spares: 1}\n")
    with pytest.raises(StartError, match=r"needs 2 GPUs, and this machine has 1; write `recover: {spares: 0}`"):
        check_machine(draft_run(job, RUN).launch)
