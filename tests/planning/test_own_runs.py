"""Craton's own measured runs: what their rows mean, and that the plan of each agrees with what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from craton.infrastructure import resolve_cluster
from craton.planning import plan
from craton.planning.calibration import STACKS, corpus, effect_labels, own_runs, predict, profile_from_fit, row_of
from craton.planning.calibration.cases import CaseFileError
from craton.planning.calibration.measured_steps import OwnRun, load_own_runs
from craton.planning.fitting import Fit
from craton.planning.setting import setting_of
from craton.planning.step import TRAINING_STEP

ROW = {
    "model": "llama-3.2-1b",
    "sequence": 4096,
    "micro_batch": 8,
    "precision": "bf16",
    "weights": "bf16",
    "gpus": 1,
    "gpu": "H200",
    "tokens_per_second": 64000.0,
    "memory_gb": 50.0,
}
CLOSE = 0.10


@pytest.mark.parametrize("run", own_runs() or [None], ids=lambda run: run.label if run else "none")
def test_a_plan_agrees_with_what_was_measured(run: OwnRun | None) -> None:
    if run is None:
        pytest.skip("data/craton_runs.json has no rows")
    answer = plan(run.job())
    assert answer.calibrated
    assert answer.step_seconds == pytest.approx(run.step_seconds, rel=CLOSE)
    assert answer.memory_bytes == pytest.approx(run.memory_gb * 1e9, rel=CLOSE)


def test_a_row_is_a_job_and_a_case() -> None:
    run = OwnRun.model_validate(ROW)
    job, case = run.job(), run.case()
    assert job.train is not None
    assert (job.train.weights, job.global_batch_sequences, job.sequence) == ("bf16", 8, 4096)
    assert (case.family, case.machine.gpu, case.machine.num_gpus, case.weights) == ("craton", "H200-SXM", 1, "bf16")
    assert case.measured_step_seconds == run.step_seconds == 8 * 4096 / 64000
    answer = plan(job)
    assert answer.layout == case.layout
    assert answer.cluster.instance.gpu.name == "H200-SXM"


def test_rows_become_the_profile() -> None:
    """Three runs a fifth slower than the priors say move the profile there, and its interval becomes narrow."""
    jobs = [
        OwnRun.model_validate({**ROW, "model": model, "micro_batch": micro_batch})
        for model, micro_batch in (("llama-3.2-1b", 8), ("llama-3.2-3b", 4), ("llama-3.1-8b", 2))
    ]
    settings = [setting_of(run.job(), resolve_cluster(run.job().cluster)) for run in jobs]
    terms = [setting.model.terms(run.case().layout) for setting, run in zip(settings, jobs, strict=True)]
    priors = Fit(TRAINING_STEP, [row_of(case) for case in corpus()])
    labels = effect_labels(family="craton", release="", gpu="H200-SXM", generation="hopper")
    traits = STACKS["craton"]
    before = profile_from_fit(priors, "craton", "", labels, traits, 0, "")
    slower = [
        run.model_copy(
            update={"tokens_per_second": run.micro_batch * 4096 / (1.2 * predict(before, term).seconds)}
        ).case()
        for run, term in zip(jobs, terms, strict=True)
    ]
    after = profile_from_fit(
        Fit(TRAINING_STEP, [row_of(case) for case in (*corpus(), *slower)]), "craton", "H200-SXM", labels, traits, 3, ""
    )
    for term, case in zip(terms, slower, strict=True):
        assert predict(after, term).seconds == pytest.approx(case.measured_step_seconds, rel=0.05)
        assert predict(after, term).log_deviation < 0.85 * predict(before, term).log_deviation
    assert after.calibrated
    assert np.isfinite(after.log_constants).all()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[]", 'expected an object with a list under "runs"'),
        ("{", 'expected an object with a list under "runs"'),
        (json.dumps({"runs": [ROW, {**ROW, "tokens": 3}]}), "run 2: tokens: Extra inputs are not permitted"),
        (json.dumps({"runs": [{**ROW, "memory_gb": 0}]}), "run 1: memory_gb: Input should be greater than 0"),
    ],
)
def test_a_wrong_file_is_told(tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "runs.json"
    file.write_text(content)
    with pytest.raises(CaseFileError) as caught:
        load_own_runs(file)
    assert says in str(caught.value)
