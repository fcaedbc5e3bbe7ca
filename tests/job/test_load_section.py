"""The keys `serve.load` and `serve.slo`: what they mean, and that every mistake is one clear line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from craton.errors import CratonError
from craton.job import ContentError, dump_job, is_planned_only, make_job, parse_job

JOB = "kind: serve\nmodel: llama-3.1-8b\ncluster: p5en.48xlarge x 1\n"


def test_a_load_and_its_limits() -> None:
    job = parse_job(
        JOB + "serve:\n  load: {rate: 20, input: {mean: 1k, p95: 3k}, output: 256, prefix_hits: 0.4}\n"
        "  slo: {ttft: 500ms, tpot: {mean: 30ms, p99: 80ms}}\n"
    )
    assert job.serve is not None
    load = job.serve.load
    assert load is not None
    assert (load.rate, load.concurrency, load.input.mean, load.input.p95, load.output.mean) == (
        20.0,
        None,
        1024,
        3072,
        256,
    )
    limits = {("ttft", "p95"): 0.5, ("tpot", "mean"): 0.03, ("tpot", "p99"): 0.08}
    assert job.serve.slo.limits == limits, "a duration alone is p95"
    shares = parse_job(f"{JOB}serve: {{speculate: {{ngram: 2}}, load: {{prefix_hits: 30%, acceptance: 62.5%}}}}\n")
    assert shares.serve is not None
    assert shares.serve.load is not None
    assert (shares.serve.load.prefix_hits, shares.serve.load.acceptance) == (0.3, 0.625)
    assert parse_job(dump_job(job)) == job


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("load: {rate: 20, concurrency: 3}", "remove one of them"),
        ("load: {rate: 0}", "serve.load.rate: 0 is not a rate; write requests per second"),
        ("load: {rate: 1e-300}", "1e-300 is not a rate; write requests per second, e.g. 20, from 1e-06 to 1,000,000"),
        ("load: {output: 1}", "an output of 1 token has no decode steps to plan; write 2 or more"),
        ("load: {rate: -1}", "serve.load.rate: -1 is not a rate"),
        ("load: {concurrency: 0}", "serve.load.concurrency: 0 is not a whole number from 1"),
        ("load: {input: {mean: 100, p95: 1000}}", "p95 1,000 does not go with mean 100; write 100 to 386"),
        ("load: {input: {min: 9, max: 3}}", "serve.load.input: max 3 is below min 9; swap them"),
        ("load: {output: {p95: 3}}", "p95 is not a distribution; write a number of tokens"),
        ("load: {input: 130k, output: 2k}", "above the context length of 131,072; shorten them"),
        ("load: {prefix_hits: 1.2}", "serve.load.prefix_hits: 1.2 is not a share"),
        ("load: {prefix_hits: 1}", "would leave no prompt token to compute"),
        ("load: {acceptance: 1.01}", "serve.load.acceptance: 1.01 is not a share from 0 to 1"),
        ("load: {acceptance: 0.7}", "acceptance applies to speculative decoding; set serve.speculate"),
        ("load: {concurrency: 8, burstiness: 2}", "burstiness applies to a rate; remove it"),
        ("load: {rate: 8, burstiness: 0}", "burstiness: 0 is not from 0.01 to 100; 1: Poisson, less is burstier"),
        ("load: {rat: 3}", "key 'rat' is not known under serve.load"),
        ("slo: {ttft: {p42: 1s}}", "'p42' is not a statistic; allowed: mean, p50, p90, p95, p99"),
        ("slo: {ttft: 0}", "serve.slo.ttft: 0 is not above zero"),
        ("slo: {ttft: 500}", "serve.slo.ttft: 500 has no unit; write 500ms or 500s"),
        ("slo: {tpot: {p99: 0.05}}", "serve.slo.tpot: 0.05 has no unit; write 0.05ms or 0.05s"),
        ("load: {prefix_hits: 120%}", "serve.load.prefix_hits: '120%' is not a share"),
        ("attention_dp: 2", "attention_dp applies to plans of vllm, sglang, trtllm"),
        ("replicas: 1000000000", "serve.replicas: 1000000000 is not a whole number from 1 to 10000"),
        ("precision: nvfp4", "precision nvfp4 applies to plans of vllm, sglang, trtllm (key software), not of craton"),
        ("precision: gptq", "did you mean 'int4'?"),
        ("precision: fp8, activation_precision: fp8", "activation_precision applies to plans of vllm"),
        ("precision: fp32, kv_precision: bf16", "a model in fp32 has its KV cache in fp32 or fp8"),
    ],
)
def test_a_mistake_names_its_key_and_what_is_allowed(keys: str, message: str) -> None:
    with pytest.raises(ContentError) as error:
        parse_job(f"{JOB}serve: {{{keys}}}\n")
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_other_engines_are_planned_with_more_sizes() -> None:
    job = parse_job(JOB + "software: vllm\nlayout: {tp: 2, pp: 2, ep: 2}\nserve: {attention_dp: 4, replicas: 2}\n")
    assert job.serve is not None
    assert (job.serve.attention_dp, job.serve.replicas) == (4, 2)
    with pytest.raises(ContentError, match="layout: fsdp does not apply to a server"):
        parse_job(JOB + "software: vllm\nlayout: {fsdp: 2}\n")
    with pytest.raises(ContentError, match="layout: pp does not apply to a server"):
        parse_job(JOB + "layout: {pp: 2}\n")


def test_a_profile_file_has_the_keys_of_its_engine(tmp_path: Path) -> None:
    keys = "layout: {tp: 2, pp: 2, ep: 2}\nserve: {attention_dp: 2, precision: int4, activation_precision: bf16}\n"
    for engine in ("sglang", "craton", ""):
        (tmp_path / f"of-{engine}.json").write_text(json.dumps({"engine": engine} if engine else [1]))
    job = parse_job(f"{JOB}software: of-sglang.json\n{keys}", folder=tmp_path)
    assert is_planned_only(job.software)
    with pytest.raises(ContentError, match="does not apply to a server"):
        parse_job(f"{JOB}software: of-craton.json\n{keys}", folder=tmp_path)
    assert not is_planned_only(parse_job(f"{JOB}software: of-craton.json\n", folder=tmp_path).software)
    with pytest.raises(ContentError, match=r"profile file .none\.json. does not exist"):
        parse_job(f"{JOB}software: none.json\n{keys}", folder=tmp_path)
    assert not is_planned_only(parse_job(f"{JOB}software: of-.json\n{keys}", folder=tmp_path).software), "no profile"


@pytest.mark.parametrize(
    ("weights", "activations", "allowed"),
    [("int4", "fp8", "auto, bf16"), ("nvfp4", "fp8", "auto, bf16, nvfp4"), ("bf16", "fp8", "auto, bf16")],
)
def test_activations_that_no_kernel_multiplies_are_refused(weights: str, activations: str, allowed: str) -> None:
    keys = f"software: vllm\nserve: {{precision: {weights}, activation_precision: {activations}}}\n"
    with pytest.raises(ContentError, match=f"weights in {weights} are not multiplied with .* may be {allowed}"):
        parse_job(JOB + keys)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.sampled_from(["mean", "p95", "p99", "min", "max", "x"]), st.integers(-5, 5000), max_size=3),
)
KEYS = ("rate", "concurrency", "input", "output", "prefix_hits", "acceptance", "burstiness")


@seed(1)
@settings(max_examples=60, deadline=None, database=None)
@given(
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3),
    st.dictionaries(st.sampled_from(["ttft", "tpot", "e2e"]), VALUES, max_size=2),
)
def test_any_value_is_a_load_or_one_line_each(load: dict[str, object], slo: dict[str, object]) -> None:
    data = {"kind": "serve", "model": "llama-3.1-8b", "cluster": "p5en.48xlarge x 1"}
    try:
        job = make_job({**data, "serve": {"load": load, "slo": slo}})
    except CratonError as error:
        problems = str(error).splitlines()
        assert all("serve." in problem for problem in problems), problems
    else:
        assert job.serve is not None
        assert all(limit > 0 for limit in job.serve.slo.limits.values())
