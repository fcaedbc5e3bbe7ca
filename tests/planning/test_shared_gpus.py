"""The plan of ranks that share a GPU: its compute and memory are divided, and communication is a socket on loopback."""

from __future__ import annotations

import io
import json
from datetime import date
from pathlib import Path

import pytest
from fake_gpus import machine_with_h200s
from rich.console import Console

from craton.job import parse_job
from craton.planning import Plan, plan
from craton.planning.report import plan_html, plan_to_json, render_plan

JOB = """\
name: parts
kind: pretrain
model: {layers: 8, hidden: 1024, ffn_hidden: 2816, heads: 8, vocab: 4096}
data: {sequence: 1024}
train: {global_batch_sequences: 16, steps: 40}
"""
SHARED = JOB + "cluster: local x 4\nrun: {share_gpus: true}\n"
SENTENCE = "4 ranks share 1 x H200-SXM: 1/4 of its compute, 35.1 GiB each; communication is a socket on loopback"


@pytest.fixture(autouse=True)
def _one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with_h200s(tmp_path, monkeypatch)


def shown(predicted: Plan) -> str:
    output = io.StringIO()
    render_plan(predicted, Console(file=output, width=200), date(2026, 11, 17))
    return output.getvalue()


def test_the_ranks_together_are_one_gpu() -> None:
    whole, shared = plan(parse_job(JOB + "cluster: local x 1\n")), plan(parse_job(SHARED))
    assert (shared.layout.world, shared.cluster.instance.nodes_per_gpu) == (4, 4)
    assert shared.memory_limit_bytes == whole.memory_limit_bytes / 4
    assert shared.phases["compute"] >= whole.phases["compute"], "four quarters are not faster than the whole"
    assert shared.phases["communication"] > 0 == whole.phases["communication"]
    assert 0 < shared.mfu < whole.mfu, "of the whole GPU"
    assert len(shared.scaling) == 1, "more ranks on the same GPU are not more hardware"
    assert shared.runner_up is None, "parts of a GPU are not compared with whole ones"


def test_the_plan_says_so_in_every_form() -> None:
    predicted = plan(parse_job(SHARED))
    text = shown(predicted)
    assert SENTENCE in text
    assert "fits on local x 4 (1 H200-SXM)" in text
    assert SENTENCE in plan_html(predicted, date(2026, 11, 17))
    assert json.loads(json.dumps(plan_to_json(predicted)))["cluster"]["instance"]["nodes_per_gpu"] == 4
    assert "sharing" not in shown(plan(parse_job(JOB + "cluster: local x 1\n")))


def test_a_model_that_is_too_large_for_its_part() -> None:
    predicted = plan(parse_job(SHARED.replace("layers: 8, hidden: 1024", "layers: 80, hidden: 8192")))
    text = shown(predicted)
    assert not predicted.fits
    assert "per rank, but its part of a GPU has 35.1 GiB" in text
    assert "use fewer ranks or a smaller model" in text
