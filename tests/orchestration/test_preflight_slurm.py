"""Pre-flight of an allocation: every node judged as one of its run, and their results compared over all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from infrastructure.node_images import HEALTHY, Node, lab_cluster_file
from slurm_lab import SlurmLab
from slurm_runs import chain_job, events_of, expect_whole_chain, hosts_of, submit, wait_for_run
from typer.testing import CliRunner

from craton.agent import Launch, write_launch
from craton.cli.app import app
from craton.infrastructure.probes import NodeRoot
from craton.job import load_job
from craton.orchestration.preflight import PreflightFinding, diagnose, node_check
from craton.orchestration.preflight.finding import for_job
from craton.orchestration.preflight.selftest import EndedSelftest
from craton.orchestration.slurm.checks import failures_of, gang_findings, gang_in_words, software_failure
from craton.telemetry import RunDirectory

RIGHT, WRONG = "aa" * 32, "bb" * 32


def device(number: int, value: str = RIGHT, **more: object) -> dict[str, Any]:
    usual = {"name": "NVIDIA H200", "torch": "2.11.0", "cuda": "13.0", "wrong": [], "tflops": {}, "error": ""}
    counted = {"repeats": {"matmul_bf16": 9}, "mismatches": {"matmul_bf16": 0}}
    return {"device": f"cuda:{number}", "hashes": {"matmul_bf16": value}, **usual, **counted, **more}


def document(node: str, *devices: dict[str, Any], findings: tuple[PreflightFinding, ...] = ()) -> dict[str, Any]:
    return {"findings": [each.to_json() for each in findings], "nodes": [{"node": node, "compute": list(devices)}]}


def reasons(*documents: dict[str, Any]) -> dict[str, list[str]]:
    return {node: [each["evidence"] for each in failed] for node, failed in failures_of(documents).items()}


# -- what the nodes said together ---------------------------------------------------------------------------------


def test_a_node_whose_cards_all_compute_wrong_alike_is_found_by_the_others() -> None:
    """By itself it looks fine: its cards agree with each other, always."""
    said = [document(f"g{number}", device(0), device(1)) for number in (1, 2)]
    bad = document("g3", device(0, WRONG), device(1, WRONG))
    found = reasons(*said, bad)
    assert (found["g1"], found["g2"]) == ([], [])
    assert found["g3"] == [
        f"cuda:{number} of g3: matmul_bf16 differs from 5 others of NVIDIA H200" for number in range(2)
    ]


def test_without_a_majority_no_node_is_trusted() -> None:
    found = reasons(document("g1", device(0)), document("g2", device(0, WRONG)))
    assert found["g1"] == found["g2"]
    assert "there is no majority" in found["g1"][0]


def test_nodes_of_different_kinds_are_not_compared() -> None:
    others = document("g2", device(0, WRONG, name="NVIDIA H100"))
    assert reasons(document("g1", device(0)), others) == {"g1": [], "g2": []}


def test_what_a_node_said_itself_counts_and_is_not_told_twice() -> None:
    unsteady = device(0, mismatches={"matmul_bf16": 2})
    own = PreflightFinding(
        "infrastructure", "compute", "fail", "cuda:0 of g1: matmul_bf16 gave a different result 2 of 9 times", "", "g1"
    )
    count = PreflightFinding("infrastructure", "gpu_count", "fail", "7 of 8 GPUs", "", "g1")
    warned = PreflightFinding("infrastructure", "hugepages", "warn", "none", "", "g2")
    found = reasons(document("g1", unsteady, findings=(own, count)), document("g2", device(0), findings=(warned,)))
    assert found == {"g1": [own.evidence, "7 of 8 GPUs"], "g2": []}


def test_reports_that_another_version_wrote_stop_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory.create(tmp_path, "checked")
    (run.path / "preflight").mkdir()
    told = {
        "1": '{"findings": [], "nodes": [{"node": "g1", "compute": [{"device": "cuda:0"}]}]}',
        "2": "{torn",
        "3": "",
    }
    for name, text in told.items():
        (run.path / "preflight" / f"{name}.json").write_text(text)
    assert gang_in_words(run) == ""
    assert "cannot be compared" in capsys.readouterr().err
    assert gang_findings([{"findings": [], "nodes": [{"node": "g1"}]}]) == []


# -- a node as one of a run ---------------------------------------------------------------------------------------


def run_of(
    cluster: str, folder: Path, nodes: int, more: str = "command: 'true'", kind: str = "command"
) -> RunDirectory:
    run = RunDirectory.create(folder / "runs", "job")
    run.job_path.write_text(f"kind: {kind}\ncluster: {cluster}\n{more}\n", encoding="utf-8")
    write_launch(run, Launch(0, [f"node-{number}" for number in range(nodes)], 8, ["true"], gpus=True))
    return run


COMMAND_IN_IMAGE = ("command", "command: 'true'\nrun: {image: team/train.sqsh}", "note")
PRETRAIN = ("pretrain", "model: llama-3.1-8b\ntrain: {steps: 1, global_batch_sequences: 16}", "fail")


def without_efa() -> Node:
    node = HEALTHY["p5"]()
    node.ports.pop()
    node.limits["locked memory"] = "65536"
    return node


def test_a_run_on_one_node_needs_no_network_there(tmp_path: Path) -> None:
    image = without_efa().write(tmp_path / "node")
    apart = diagnose(image, run=run_of("p5 x 2", tmp_path / "two", 2)).findings
    failed = {finding.what for finding in apart if finding.severity == "fail"}
    assert failed == {"efa_count", "locked_memory"}
    alone = {finding.what: finding for finding in diagnose(image, run=run_of("p5 x 1", tmp_path / "one", 1)).findings}
    assert {alone[what].severity for what in failed} == {"note"}


def test_machines_that_only_the_cluster_file_knows_are_held_against_it(tmp_path: Path) -> None:
    node = HEALTHY["lab-h100"]()
    node.ports[2].state = "1: DOWN"
    (tmp_path / "lab.yaml").write_text(lab_cluster_file(), encoding="utf-8")
    run = run_of(f"{tmp_path / 'lab.yaml'} x 2", tmp_path, 2)
    found = diagnose(node.write(tmp_path / "node"), run=run)
    assert {each.what for each in found.findings if each.severity == "fail"} == {"infiniband"}
    assert found.nodes[0]["instance"] is not None


@pytest.mark.parametrize(
    ("kind", "more", "severity"),
    [
        ("command", "command: 'true'", "note"),
        COMMAND_IN_IMAGE,
        PRETRAIN,
    ],
)
def test_torch_of_this_environment_matters_only_where_it_is_used(
    kind: str, more: str, severity: str, tmp_path: Path
) -> None:
    node = HEALTHY["p5"]()
    node.packages["torch"] = "2.11.0+cpu"
    run = run_of("p5 x 2", tmp_path, 2, more, kind)
    found = {finding.what: finding for finding in diagnose(node.write(tmp_path / "node"), run=run).findings}
    assert found["torch"].severity == severity


@pytest.mark.parametrize(("kind", "more", "severity"), [COMMAND_IN_IMAGE, PRETRAIN])
def test_a_command_needs_no_torch_to_test_its_cards_with(
    kind: str, more: str, severity: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of JAX, in an image that has no torch."""
    node = HEALTHY["p5"]()
    del node.packages["torch"]
    place = NodeRoot(node.write(tmp_path / "node"))
    monkeypatch.setattr(node_check, "NodeRoot", lambda: place)
    ended = EndedSelftest([], "the self-test could not start: No module named 'torch'", lacks_torch=True)
    monkeypatch.setattr(node_check, "run_compute", lambda: ([], [ended.finding("compute")]))
    runs = [run_of("p5 x 2", tmp_path / str(number), 2, more, kind) for number in range(2)]
    said = [diagnose(run=run, compute=True).to_json() for run in runs]
    assert [each["severity"] for each in said[0]["findings"] if each["what"] == "compute"] == [severity]
    (runs[0].path / "preflight").mkdir()
    for number, document in enumerate(said):
        document["nodes"][0]["node"] = f"g{number}"
        (runs[0].path / "preflight" / f"{number}.json").write_text(json.dumps(document))
    assert bool(software_failure(runs[0])) == (severity == "fail")
    assert bool([each for failed in failures_of(said).values() for each in failed]) == (severity == "fail")


@pytest.mark.parametrize(
    ("more", "severity"), [("command: 'true'", "note"), ("command: 'true'\nrun: {image: team/train.sqsh}", "fail")]
)
def test_libraries_for_the_network_are_those_of_the_image(more: str, severity: str, tmp_path: Path) -> None:
    """Without aws-ofi-nccl a command falls to sockets, silently; outside of an image it may bring a plugin along."""
    findings = [
        PreflightFinding("ML software", "nccl_plugin", "fail", "there is none"),
        PreflightFinding("infrastructure", "efa_count", "fail", "7"),
    ]
    found = for_job(findings, load_job(run_of("p5 x 2", tmp_path, 2, more).job_path))
    assert {finding.what: finding.severity for finding in found} == {"nccl_plugin": severity, "efa_count": "fail"}


def test_the_environment_of_the_ranks_is_looked_at(tmp_path: Path) -> None:
    run = run_of("p5 x 2", tmp_path, 2)
    launch = Launch(0, ["node-0", "node-1"], 8, ["true"], env={"NCCL_SOCKET_IFNAME": "lo"}, gpus=True)
    write_launch(run, launch)
    found = diagnose(HEALTHY["p5"]().write(tmp_path / "node"), run=run).findings
    assert any("NCCL_SOCKET_IFNAME" in finding.evidence for finding in found if finding.what == "environment")


def test_doctor_takes_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRATON_RUNS", str(tmp_path / "runs"))
    run_of("p5 x 1", tmp_path, 1)
    image = without_efa().write(tmp_path / "node")
    done = CliRunner().invoke(app, ["doctor", "--json", "--run", "job", "--root", str(image)], catch_exceptions=False)
    assert (done.exit_code, json.loads(done.stdout)["nodes"][0]["instance"]) == (0, "p5.48xlarge")
    refused = CliRunner().invoke(app, ["doctor", "--run", "job", "--cluster", "p5"])
    assert "omit NODES, --cluster and --nccl-log" in str(refused.exception)


# -- on a real Slurm ----------------------------------------------------------------------------------------------

# A processor that flips one bit of every product of a matrix, always the same one: near enough to pass for right, and
# never twice different. It is loaded by every Python that finds it on its path.
FLIPPED_BIT = """
import os, sys
if os.environ.get("SLURMD_NODENAME") == "g2" and "craton.ml.selftest" in sys.orig_argv:
    import torch
    product = torch.Tensor.__matmul__

    def flipped(left, right):
        result = product(left, right)
        if result.dtype is torch.bfloat16:
            result.view(torch.int16)[0, 0] ^= 1
        return result

    torch.Tensor.__matmul__ = flipped
"""


@pytest.mark.slow
def test_a_node_that_computes_wrong_alike_takes_no_part(
    root: Path, slurm: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three nodes, the second of which flips a bit: the job goes on without it."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(FLIPPED_BIT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    run = submit(root, chain_job("checked", nodes=3, run="preflight: compute"))
    wait_for_run(run, "done")
    expect_whole_chain(run, 20)
    (failed,) = events_of(run, "preflight_failed")
    assert str(failed["message"]).startswith("g2: compute: cpu of g2: matmul_bf16 differs from 2 others")
    first, second = (str(event["message"]) for event in events_of(run, "preflight"))
    assert "of g2: matmul_bf16 differs" in first
    assert second.startswith("3 devices, ")
    assert second.endswith("all identical")
    assert "g2" not in hosts_of(run).values()
    assert len(events_of(run, "allocated")) == 1, "nothing was started before all nodes were fit"
