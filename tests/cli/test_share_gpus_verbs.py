"""`--share-gpus` and `run: {share_gpus: true}` on the command line: the plan says so, and every mistake is one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_gpus import machine_with_h200s
from run_verbs import Verbs

JOB = """\
kind: pretrain
model: {layers: 8, hidden: 1024, ffn_hidden: 2816, heads: 8, vocab: 4096}
data: {sequence: 1024}
train: {global_batch_sequences: 16, steps: 40}
cluster: local x 4
"""
SHARED = JOB + "run: {share_gpus: true}\n"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job file on a machine with one H200."""
    machine_with_h200s(tmp_path, monkeypatch)
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def test_plan_and_validate_with_shared_gpus(verbs: Verbs, job: Path) -> None:
    planned = verbs("plan", job, "--share-gpus")
    assert planned.returncode == 0
    assert "4 ranks share 1 x H200-SXM: 1/4 of its compute, 35.1 GiB each" in planned.stdout
    job.write_text(SHARED)
    assert verbs.json("plan", job)["cluster"]["instance"]["nodes_per_gpu"] == 4
    assert verbs.json("validate", job)["num_gpus"] == 4
    drafted = verbs.json("run", job, "--dry-run")["files"]
    assert '"nodes_per_gpu": 4' in drafted["launch.json"]
    assert "share_gpus: true" in drafted["job.yaml"]


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (JOB, ("plan",), "cannot split 1 GPU equally; use local x 1"),
        (JOB, ("run", "--dry-run"), "share GPUs with `run: {share_gpus: true}` or --share-gpus"),
        (JOB, ("run", "--share-gpus", "--on", "slurm"), "--share-gpus: share_gpus is for runs on this machine"),
        (JOB, ("run", "--share-gpus", "--on", "kubernetes"), "not on kubernetes"),
        (JOB, ("plan", "--share-gpus", "--instances", "p5"), "--instances searches clusters"),
        (JOB.replace("local x 4", "p5.48xlarge x 1"), ("plan", "--share-gpus"), "is for `cluster: local x N`"),
        (SHARED.replace("x 4", "x 200"), ("validate",), "use at most 70 per GPU, here local x 70"),
        (SHARED.replace("x 4", "x 200"), ("plan",), "use at most 70 per GPU, here local x 70"),
        (SHARED.replace("x 4", "x 200"), ("run", "--dry-run"), "use at most 70 per GPU, here local x 70"),
    ],
)
def test_a_mistake_is_one_line(verbs: Verbs, job: Path, text: str, arguments: tuple[str, ...], message: str) -> None:
    job.write_text(text)
    verb, *options = arguments
    result = verbs(verb, job, *options)
    assert (result.returncode, result.stdout) == (2, "")
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert message in lines[0]


@pytest.mark.parametrize("verb", ["plan", "validate", "run"])
def test_without_a_gpu_there_is_nothing_to_share(
    verb: str, verbs: Verbs, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    job.write_text(SHARED)
    result = verbs(verb, job)
    assert result.returncode == 2
    assert "job.yaml:5: cluster: local x 4 with share_gpus needs a GPU, and this machine shows none" in result.stderr
