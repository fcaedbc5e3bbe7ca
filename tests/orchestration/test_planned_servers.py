"""Servers that Craton plans but does not run are refused before anything starts."""

from __future__ import annotations

import pytest

from craton.job import parse_job
from craton.orchestration import StartError
from craton.orchestration.draft.plan_job import plan_job

JOB = "kind: serve\nmodel: llama-3.1-8b\ncluster: p5en.48xlarge x 1\n"


def test_another_engine_is_planned_only() -> None:
    with pytest.raises(StartError, match="software: vllm is planned but not run by Craton; remove `software:`"):
        plan_job(parse_job(f"{JOB}software: vllm\nserve: {{initialize: random}}\n"))


def test_a_run_is_one_server() -> None:
    with pytest.raises(StartError, match=r"serve\.replicas: 3 are for plans only; a run starts one server"):
        plan_job(parse_job(f"{JOB}serve: {{initialize: random, replicas: 3}}\n"))


def test_the_plan_of_a_run_keeps_the_prediction_for_its_load() -> None:
    plan = plan_job(parse_job(f"{JOB}serve: {{initialize: random, load: {{rate: 2}}}}\n")).serving
    assert plan is not None
    assert plan.load is not None
    assert plan.load.ttft_seconds > 0
