"""`share_gpus`: where it applies, what its ranks get, and what pre-flight reports, with the GPUs of a stand-in tool."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from fake_gpus import machine_with_h200s, mps_daemon
from waiting import PATIENCE_SECONDS

from craton.agent import Launch
from craton.api import preview, run
from craton.job import ContentError, load_job, parse_job
from craton.orchestration import StartError
from craton.orchestration.changes.resize import with_nodes
from craton.orchestration.draft import draft_run
from craton.orchestration.local import check_machine, with_cards
from craton.orchestration.preflight import sharing_found
from craton.orchestration.preflight.sharing import check_sharing, mps_runs
from craton.orchestration.start import draft_resumption

RUN = Path("/runs/small")
TRAIN = """\
name: small
kind: pretrain
model: {layers: 8, hidden: 1024, ffn_hidden: 2816, heads: 8, vocab: 4096}
data: {sequence: 1024}
train: {global_batch_sequences: 16, steps: 40}
cluster: local x 4
"""
NAMES = (
    "NCCL_HOSTID",
    "NCCL_NET",
    "NCCL_SOCKET_IFNAME",
    "CUDA_VISIBLE_DEVICES",
    "CRATON_GPU_MEMORY_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
)
COMMAND = f"name: parts\nkind: command\ncommand: echo {' '.join(f'${name}' for name in NAMES)}\ncluster: local x 4\n"


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A machine with one H200 and no MPS daemon."""
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "none"))
    return machine_with_h200s(tmp_path, monkeypatch)[0]


def test_a_rank_of_each_node_on_one_gpu(gpu: str, root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    handle = run(parse_job(COMMAND, folder=folder), share_gpus=True)
    assert handle.wait(PATIENCE_SECONDS).state == "done"
    lines = [handle.directory.log_path(rank).read_text().split() for rank in range(4)]
    assert lines == [[f"node-{rank}-0", "Socket", "lo", gpu, "0.2429", "0.2429"] for rank in range(4)]
    assert load_job(handle.directory.job_path).run.share_gpus, "a resume keeps it"
    assert "time-sliced: ranks take turns" in sharing_found(handle.directory, "node-0")


def test_a_training_job_has_a_plan_and_a_bound(gpu: str) -> None:
    draft = draft_run(parse_job(TRAIN + "run: {share_gpus: true}\n"), RUN)
    launch = draft.launch
    assert draft.plan is not None
    assert (draft.num_ranks, launch.ranks_per_node, launch.gpus, launch.nodes_per_gpu) == (4, 1, True, 4)
    assert launch.env["CRATON_GPU_MEMORY_FRACTION"] == "0.2429"
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in launch.env
    check_machine(launch)
    assert with_cards(launch).cards == dict.fromkeys(launch.nodes, gpu)


def test_processes_of_a_command_share_the_part_of_their_node(gpu: str) -> None:
    draft = draft_run(parse_job(COMMAND + "processes: 2\nrun: {share_gpus: true}\n"), RUN)
    assert (draft.launch.ranks_per_node, draft.launch.nodes_per_gpu) == (2, 4)
    assert draft.launch.env["CRATON_GPU_MEMORY_FRACTION"] == "0.1179", "an eighth, less the CUDA context"


def test_nodes_are_spread_over_several_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = machine_with_h200s(tmp_path, monkeypatch, count=2)
    job = parse_job(COMMAND + "run: {share_gpus: true}\nrecover: {spares: 1}\n")
    launch = draft_run(job, RUN).launch
    check_machine(launch)
    assert list(with_cards(launch).cards.values()) == [first, first, second, second, first], "a spare shares a GPU too"
    few = draft_run(parse_job(COMMAND.replace("x 4", "x 2") + "run: {share_gpus: true}\n"), RUN).launch
    assert (few.nodes_per_gpu, few.env.get("CRATON_GPU_MEMORY_FRACTION")) == (1, None)
    assert list(with_cards(few).cards.values()) == [first, second], "two nodes need not share two GPUs"


def test_a_run_does_not_grow_beyond_the_parts_of_its_gpus(gpu: str) -> None:
    launch = draft_run(parse_job(COMMAND + "run: {share_gpus: true}\n"), RUN).launch
    check_machine(with_nodes(replace(launch, num_nodes=2), 4))
    with pytest.raises(
        StartError, match=r"1 GPU of this machine have room for 4 nodes, not 6; .*--cluster 'local x 6'"
    ):
        check_machine(with_nodes(launch, 6))


@pytest.mark.parametrize(
    ("on", "message"),
    [
        ("slurm", "share_gpus is for runs on this machine, not on slurm.*--on local"),
        ("kubernetes", "share_gpus is for runs on this machine, not on kubernetes"),
        (None, "needs a GPU, and this machine shows none"),
    ],
)
def test_a_start_that_cannot_share_is_refused(on: str | None, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(StartError, match=message):
        draft_run(parse_job(COMMAND + "run: {share_gpus: true}\n"), RUN, on=on)
    with pytest.raises((StartError, ContentError), match=message):
        preview(parse_job(COMMAND), on=on, share_gpus=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TRAIN + "run: {share_gpus: true, on: slurm}\n", "job.yaml:7: run: share_gpus is for runs on this machine"),
        (
            TRAIN.replace("local x 4", "p5.48xlarge x 2") + "run: {share_gpus: true}\n",
            "job.yaml:7: run: share_gpus is for `cluster: local x N`, not for p5.48xlarge x 2",
        ),
        (
            "kind: serve\nmodel: llama-3.2-1b\ncluster: local\nrun: {share_gpus: true}\n",
            "job.yaml:4: run: share_gpus does not apply to kind serve",
        ),
    ],
)
def test_a_job_file_that_cannot_share_is_refused_at_its_line(text: str, message: str) -> None:
    with pytest.raises(ContentError) as caught:
        parse_job(text)
    (problem,) = caught.value.problems
    assert message in problem
    plain = parse_job(text.replace("share_gpus: true", "preflight: auto"))
    with pytest.raises(ContentError, match="--share-gpus: share_gpus"):
        plain.with_shared_gpus()


def test_a_model_that_is_too_large_for_its_part_is_refused(gpu: str) -> None:
    large = TRAIN.replace("layers: 8, hidden: 1024", "layers: 80, hidden: 8192") + "run: {share_gpus: true}\n"
    with pytest.raises(StartError, match=r"a rank needs .* of 35.1 GiB .*fewer ranks on each GPU"):
        draft_run(parse_job(large), RUN)


def test_a_command_without_the_flag_is_told_of_it(gpu: str) -> None:
    with pytest.raises(StartError, match=r"cannot divide 1 GPU evenly; .*`run: {share_gpus: true}` or --share-gpus"):
        draft_run(parse_job(COMMAND), RUN)


def test_a_resume_may_share_gpus_that_became_fewer(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    machine_with_h200s(tmp_path, monkeypatch, count=2)
    text = "name: fewer\nkind: command\ncommand: exit 7\ncluster: local x 2\nrecover: {tries: 0}\n"
    handle = run(parse_job(text, folder=folder))
    assert handle.wait(PATIENCE_SECONDS).state == "failed"
    machine_with_h200s(tmp_path, monkeypatch)
    with pytest.raises(StartError, match="--share-gpus"):
        draft_resumption(handle.directory)
    draft = draft_resumption(handle.directory, share_gpus=True).draft
    assert (draft.launch.nodes_per_gpu, draft.job.run.share_gpus) == (2, True)
    with pytest.raises(ContentError, match="not on slurm"):
        draft_resumption(handle.directory, on="slurm", share_gpus=True)


def test_pre_flight_knows_whether_mps_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch(0, ["node-0", "node-1"], 1, ["true"], gpus=True, nodes_per_gpu=2)
    pipes = mps_daemon(tmp_path, monkeypatch)
    (finding,) = check_sharing(launch, {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(pipes)})
    assert (finding.what, finding.severity, finding.remedy) == ("gpu_sharing", "note", "")
    assert finding.evidence == f"MPS: its daemon runs ({pipes}), kernels of ranks overlap"
    (finding,) = check_sharing(launch, {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "other")})
    assert finding.evidence == f"time-sliced: ranks take turns (no MPS daemon at {tmp_path / 'other'})"
    assert "nvidia-cuda-mps-control -d" in finding.remedy
    assert check_sharing(replace(launch, nodes_per_gpu=1), os.environ) == []


def test_an_mps_daemon_that_has_ended_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipes = mps_daemon(tmp_path, monkeypatch, status=1)
    assert not mps_runs({**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(pipes)})
    assert not mps_runs({"PATH": "", "CUDA_MPS_PIPE_DIRECTORY": str(pipes)})
