"""`craton plan` of a server's load: options override the job's keys, and every mistake is one line and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from craton.cli import main

JOB = """\
kind: serve
model: llama-3.1-8b
cluster: p5en.48xlarge x 1
serve:
  load: {rate: 20, input: 1024, output: 256}
  slo: {ttft: 500ms, tpot: 30ms}
"""


class PlanCommand:
    """Runs the command in this process, as the console script does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], job: Path) -> None:
        self.monkeypatch, self.capsys, self.job = monkeypatch, capsys, job
        job.write_text(JOB)
        monkeypatch.setenv("COLUMNS", "100")

    def __call__(self, *options: object) -> tuple[int, str, str]:
        self.monkeypatch.setattr("sys.argv", ["craton", "plan", str(self.job), *map(str, options)])
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        shown = self.capsys.readouterr()
        return int(caught.value.code or 0), shown.out, shown.err

    def json(self, *options: object) -> dict[str, Any]:
        code, out, _ = self(*options, "--json")
        assert code == 0
        document: dict[str, Any] = json.loads(out)
        return document


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> PlanCommand:
    return PlanCommand(monkeypatch, capsys, tmp_path / "serve.yaml")


def test_the_verdict_names_deployment_latency_and_dollars(plan: PlanCommand) -> None:
    code, out, _ = plan()
    words = " ".join(out.split())
    assert code == 0
    assert "llama-3.1-8b on craton" in words
    assert "on one p5en.48xlarge hold" in words
    assert "TTFT p95" in words
    assert "≤ 500 ms" in words
    assert "per million output tokens" in words


def test_options_override_the_keys_of_the_job(plan: PlanCommand, tmp_path: Path) -> None:
    found = plan.json("--rate", 10, "--input", "mean=512,p95=1,500", "--output", "100..300", "--tpot", "p99=50ms")
    assert found["load"] | {"prefix_hits": 0.0} == {
        "rate": 10.0,
        "input": {"mean": 512, "p95": 1500},
        "output": {"min": 100, "max": 300},
        "prefix_hits": 0.0,
        "burstiness": 1.0,
    }
    assert found["slo"] == {"ttft": {"p95": 0.5}, "tpot": {"p99": 0.05}}
    closed = plan.json("--concurrency", 32, "--gpus", 1)
    assert (closed["load"]["concurrency"], "rate" in closed["load"], closed["chosen"]["gpus"]) == (32, False, 1)
    page = tmp_path / "page" / "plan.html"
    both = plan.json("--instances", "p5en,p6-b200", "--by", "cost", "--html", page)
    assert {row["instance"] for row in both["deployments"]} == {"p5en.48xlarge", "p6-b200.48xlarge"}
    assert "Latency against load" in page.read_text(encoding="utf-8")


def test_a_benchmark_begins_with_all_users_at_once(plan: PlanCommand) -> None:
    users = ("--concurrency", 64, "--gpus", 1, "--ttft", "10s")
    steady, short = plan.json(*users), plan.json(*users, "--requests", 100)
    assert steady["benchmark"]["requests"] == 100
    assert steady["benchmark"]["ttft"] == short["chosen"]["ttft"]
    assert short["benchmark"] is None
    assert short["chosen"]["ttft"]["p95"]["value"] > 2 * steady["chosen"]["ttft"]["p95"]["value"]
    words = " ".join(plan(*users)[1].split())
    assert "start burst a benchmark begins with all users at once, which the latencies of this plan do not" in words
    assert "Over 100 requests it has TTFT" in words
    assert "more users wait longer" in words
    assert "holds 64 users (640 requests) of" in " ".join(plan(*users, "--requests", 640)[1].split())


def test_precisions_are_those_of_the_options(plan: PlanCommand) -> None:
    plan.job.write_text("kind: serve\nmodel: llama-3.1-70b\ncluster: p5en.48xlarge x 1\nsoftware: sglang\n")
    found = plan.json("--precision", "int4", "--kv-precision", "fp8", "--concurrency", 8)
    assert [found[f"{name}precision"] for name in ("", "activation_", "kv_")] == ["int4", "bf16", "fp8"]
    words = " ".join(plan("--precision", "fp8", "--activation-precision", "bf16", "--rate", 5)[1].split())
    assert "precision fp8 weights; bf16 activations; bf16 KV cache" in words


def test_options_are_enough_without_a_load_in_the_job(plan: PlanCommand) -> None:
    plan.job.write_text("kind: serve\nmodel: llama-3.1-8b\ncluster: p5en.48xlarge x 1\n")
    found = plan.json("--rate", 20, "--ttft", "500ms")
    assert (found["load"]["input"], found["load"]["output"], found["holds"]) == ({"mean": 1024}, {"mean": 256}, True)


def test_a_limit_that_nothing_keeps_prints_the_plan_and_fails(plan: PlanCommand) -> None:
    code, out, errors = plan("--tpot", "1ms")
    assert code == 2
    assert "DOES NOT HOLD" in out
    assert errors.startswith("error: TPOT p95 ≤ 1 ms: no layout keeps it for 20 requests/s")
    assert len(errors.splitlines()) == 1
    code, out, errors = plan("--tpot", "1ms", "--json")
    assert (code, errors, json.loads(out)["holds"]) == (2, "", False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rate", "0"], "--rate: 0 is not a rate"),
        (["--rate", "-3"], "--rate: -3 is not a rate"),
        (["--rate", "fast"], "--rate: 'fast' is not a rate"),
        (["--rate", "1", "--concurrency", "2"], "--rate and --concurrency: a load is open or closed"),
        (["--concurrency", "0"], "--concurrency: 0 is not a whole number from 1"),
        (["--requests", "100"], "error: requests is the length of a benchmark with concurrency"),
        (
            ["--concurrency", "64", "--requests", "10"],
            "error: requests 10 are fewer than the 64 users; write 64 or more",
        ),
        (["--concurrency", "4", "--requests", "1.5"], "--requests: 1.5 is not a whole number from 1"),
        (["--acceptance", "1.5"], "--acceptance: 1.5 is not a share from 0 to 1"),
        (["--acceptance", "0.5"], "set serve.speculate"),
        (["--prefix-hits", "1.5"], "--prefix-hits: 1.5 is not a share"),
        (["--input", "200k"], "above the context length of 131,072"),
        (["--input", "9..3"], "--input: max 3 is below min 9"),
        (["--ttft", "0"], "--ttft: 0 is not above zero"),
        (["--ttft", "p42=1s"], "--ttft: 'p42' is not a statistic"),
        (["--ttft", "500"], "--ttft: 500 has no unit; write 500ms or 500s"),
        (["--e2e", "p95=1"], "--e2e: '1' has no unit; write 1ms or 1s"),
        (["--ttft", "p95=500ms,p95=1s"], "--ttft 'p95=500ms,p95=1s' gives p95 twice; remove one of them"),
        (["--input", "1,5"], "--input: '1,5' is not a number of tokens"),
        (["--input", "1024=512"], "error: --input: key '1024' is not known; allowed: mean, p95, min, max"),
        (["--ttft", "1e-30ms"], "is not a duration"),
        (["--ttft", "soon"], "--ttft: 'soon' is not a duration"),
        (["--gpus", "8..16"], "--gpus '8..16' is not a number of GPUs"),
        (["--by", "speed"], "--by 'speed' is not allowed; choose cost, gpus, time"),
        (["--instances", "p5x.48xlarge"], "p5x.48xlarge"),
        (["--instances", "g5.48xlarge", "--gpus", "0"], "--gpus '0' is not a number"),
        (["--precision", "nvfp4"], "precision nvfp4 applies to plans of vllm, sglang, trtllm"),
        (["--precision", "gptq"], "--precision: 'gptq' is not allowed; allowed: bf16, fp8"),
        (["--activation-precision", "bf16"], "activation_precision applies to plans of vllm"),
        (["--kv-precision", "fp4"], "--kv-precision: 'fp4' is not allowed; allowed: auto, bf16, fp8"),
        (["--deadline", "3d"], "applies to training jobs only"),
        (["--ttft", ""], "--ttft has no value; write one, or remove the option"),
        (["--rate", "2", "--input", " "], "--input has no value"),
        (["--strategy", ""], "--strategy has no value"),
        (["--gpus="], "--gpus has no value"),
        (["--instances", ","], "--instances ',' has an empty name; write e.g. p5,p5en,p6-b200"),
        (["--instances", "p5,,p5en"], "--instances 'p5,,p5en' has an empty name"),
    ],
)
def test_a_bad_option_is_one_clear_line(plan: PlanCommand, options: list[str], message: str) -> None:
    code, out, errors = plan(*options)
    assert (code, out) == (2, "")
    assert message in errors
    assert len(errors.splitlines()) == 1


def test_a_load_is_for_servers_only(plan: PlanCommand) -> None:
    plan.job.write_text(TRAINING)
    code, _, errors = plan("--rate", 3)
    assert code == 2
    assert "--rate applies to kind serve, not pretrain" in errors


TRAINING = """\
kind: pretrain
model: llama-3.2-1b
data: {sequence: 4096}
train: {global_batch_sequences: 32, tokens: 10B}
cluster: p5.48xlarge x 1
"""
OPTIONS = (
    *("--rate", "--concurrency", "--input", "--output", "--ttft", "--tpot", "--e2e", "--prefix-hits", "--acceptance"),
    *("--burstiness", "--gpus", "--by", "--instances", "--requests"),
    *("--precision", "--activation-precision", "--kv-precision"),
)
TEXTS = st.one_of(
    st.integers(-5, 10**12).map(str),
    st.floats().map(str),
    st.sampled_from(
        ["", "p95=3s", "1..2", "mean=3,p95=4", "500ms", "{", "[1", "a: b", "=", "..", "true", "null", "1e400"]
    ),
    st.text(max_size=6),
)


@seed(3)
@settings(
    max_examples=25,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.dictionaries(st.sampled_from(OPTIONS), TEXTS, min_size=1, max_size=3))
def test_any_option_is_a_plan_or_one_line(plan: PlanCommand, options: dict[str, str]) -> None:
    code, _, errors = plan(*(f"{name}={value}" for name, value in options.items()))
    assert code in (0, 2), options
    assert "Traceback" not in errors
    if code:
        assert len(errors.strip().splitlines()) <= 1 or "Usage" in errors, options


def test_stated_replicas_are_not_more_than_the_gpus(plan: PlanCommand) -> None:
    plan.job.write_text("kind: serve\nmodel: llama-3.1-8b\ncluster: p5en.48xlarge x 1\nserve: {replicas: 4}\n")
    assert plan.json("--rate", 5, "--gpus", 7)["chosen"]["gpus"] == 4
    code, _, errors = plan("--rate", 5, "--gpus", 2)
    assert code == 2
    assert "4 replicas (serve.replicas) need 4" in " ".join(errors.split())


def test_a_limit_in_the_job_is_planned_without_a_load(plan: PlanCommand) -> None:
    plan.job.write_text("kind: serve\nmodel: llama-3.1-8b\ncluster: p5en.48xlarge x 1\nserve: {slo: {ttft: 500ms}}\n")
    assert plan.json()["chosen"]["ttft"]["p95"]["value"] < 0.5


@pytest.mark.parametrize("load", [("--concurrency", 1), ("--rate", 0.01)])
def test_a_lone_request_takes_its_prefill_and_varies_little(plan: PlanCommand, load: tuple[object, ...]) -> None:
    plan.job.write_text("kind: serve\nmodel: llama-3.1-8b\ncluster: p5en.48xlarge x 1\n")
    found = plan.json(*load, "--input", 1500, "--output", 200, "--gpus", 1)
    ttft = {name: entry["value"] for name, entry in found["chosen"]["ttft"].items()}
    assert ttft["mean"] > found["tiers"][0]["recompute_seconds"]
    assert ttft["p99"] < 1.2 * ttft["p50"]


def test_a_page_that_cannot_be_written_is_named(plan: PlanCommand, tmp_path: Path) -> None:
    code, _, errors = plan("--html", tmp_path)
    assert code == 2
    assert "is a folder; name a file" in " ".join(errors.split())
    code, _, errors = plan("--html", plan.job / "report.html")
    assert code == 2
    assert "name another path" in " ".join(errors.split())
