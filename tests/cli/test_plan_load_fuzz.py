"""Any job and any options of `craton plan` for a server give a plan, or errors of one line and exit code 2: never a
traceback, a warning of numpy, or numbers that JSON does not have."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from craton.cli import main

VALUES = st.one_of(
    st.sampled_from(
        [
            *(
                "0",
                "-1",
                "1",
                "2",
                "1e30",
                "1e-30",
                "1e308",
                ".nan",
                ".inf",
                "-.inf",
                "true",
                "null",
                '"x"',
                "[]",
                "{}",
            ),
            *("[1]", "{mean: 0}", "{mean: 1e30}", "{mean: 1, p95: 3}", "{mean: 100, p95: 386}", "{min: 0, max: 0}"),
            *(
                "{min: 1, max: 131071}",
                "{min: 5}",
                "{mean: 130000}",
                "{p95: 1ms}",
                "{p99: 1e-30}",
                "{p42: 1s}",
                "200000",
            ),
            *("0.999999", "1.0000001", "1ns", "1k", "500ms", "2026-01-01", "999999999"),
        ]
    ),
    st.floats(0.0, 100.0).map(lambda value: f"{value:.6g}"),
    st.integers(1, 200_000).map(str),
)
LOAD_KEYS = ("rate", "concurrency", "requests", "input", "output", "prefix_hits", "acceptance", "burstiness")
LOADS = st.dictionaries(st.sampled_from(LOAD_KEYS), VALUES, max_size=3)
LIMITS = st.dictionaries(st.sampled_from(["ttft", "tpot", "e2e"]), VALUES, max_size=2)
SERVED = st.dictionaries(
    st.sampled_from(["max_length", "max_running", "chunk_tokens", "memory", "replicas", "attention_dp", "page"]),
    VALUES,
    max_size=1,
)
LAYOUTS = st.dictionaries(st.sampled_from(["tp", "pp", "ep"]), st.integers(-1, 20).map(str), max_size=2)
OPTIONS = st.dictionaries(
    st.sampled_from(["--rate", "--concurrency", "--output", "--ttft", "--prefix-hits", "--gpus", "--precision"]),
    st.sampled_from(["", "0", "1", "8", "64", "1e30", "nan", "fp8", "int4", "p99=1ms", "mean=9,p95=20"]),
    max_size=2,
)
ENGINES = st.sampled_from(["craton", "vllm", "sglang", "trtllm"])
MODELS = st.sampled_from(["llama-3.1-8b", "llama-3.1-405b", "deepseek-v3", "gpt-oss-120b"])


def no_constant(name: str) -> NoReturn:
    raise AssertionError(f"{name} is not JSON")


def mapping(values: dict[str, str]) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in values.items()) + "}"


@seed(5)
@settings(
    max_examples=60,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(MODELS, ENGINES, LOADS, LIMITS, SERVED, LAYOUTS, OPTIONS, st.booleans())
def test_any_job_is_a_plan_or_clear_errors(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    model: str,
    engine: str,
    load: dict[str, str],
    limits: dict[str, str],
    served: dict[str, str],
    layout: dict[str, str],
    options: dict[str, str],
    has_json: bool,
) -> None:
    keys = {"initialize": "random", **served, "load": mapping(load), "slo": mapping(limits)}
    if "acceptance" in load:
        keys["speculate"] = "{ngram: 4}"
    lines = ["kind: serve", f"model: {model}", "cluster: p6-b200.48xlarge x 1", f"software: {engine}"]
    lines += [f"layout: {mapping(layout)}"] if layout else []
    job = tmp_path / "serve.yaml"
    job.write_text("\n".join([*lines, f"serve: {mapping(keys)}", ""]))
    words = [f"{name}={value}" for name, value in options.items()]
    monkeypatch.setattr("sys.argv", ["craton", "plan", str(job), *words, *(["--json"] if has_json else [])])
    capsys.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with pytest.raises(SystemExit) as caught:
            main()
    shown = capsys.readouterr()
    case: Any = (job.read_text(), words, shown.err)
    assert caught.value.code in (0, 2, None), case
    errors = shown.err.strip().splitlines()
    assert all(line.startswith("error: ") for line in errors), case
    if has_json:
        document = json.loads(shown.out, parse_constant=no_constant)
        assert errors or document["holds"] is (caught.value.code != 2), case
    else:
        assert bool(errors) == (caught.value.code == 2), case
