"""A team's own profile: a few logged steps must help, too few are refused, and every bad file is one clear error."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from craton.errors import CratonError
from craton.infrastructure import cluster_of
from craton.infrastructure.catalog import gpu
from craton.job import JobError, load_job
from craton.job.layout import Layout
from craton.job.model import model_preset
from craton.planning import plan
from craton.planning.calibration import (
    CalibrationError,
    LoggedRun,
    calibrate,
    case_machine,
    corpus,
    find_profile,
    load_pins,
    load_runs,
    predict,
    save_profile,
)
from craton.planning.calibration.fit_profile import MIN_RUNS, PINNED_DEVIATION
from craton.planning.calibration.profiles import ProfileError, load_profile
from craton.planning.calibration.published_rows import case_terms, corpus_path
from craton.planning.rates import MachineRates, all_reduce_seconds, attention_seconds, gemm_seconds, machine_of
from craton.planning.software import INDEX, NAMES
from craton.planning.step import StepModel, compose
from craton.planning.step.compute import group_of

BY_ID: dict[str, dict[str, Any]] = {
    row["id"]: row for row in json.loads(Path(corpus_path()).read_text(encoding="utf-8"))["cases"]
}
H100 = machine_of(cluster_of("p5.48xlarge", 8))
JOB = """\
kind: pretrain
model: llama-3.1-8b
data: {sequence: 8192}
train: {global_batch_sequences: 32, steps: 1000}
cluster: p5.48xlarge x 1
"""
TODAY = date(2026, 11, 15)


def published(family: str, card: str) -> list[LoggedRun]:
    return [
        LoggedRun(case.id, case_terms(case), case_machine(case), case.measured_step_seconds)
        for case in corpus()
        if (case.family, case.machine.gpu) == (family, card)
    ]


def simulated(constants: dict[str, float], layouts: list[Layout], batch: int = 256) -> list[LoggedRun]:
    """Runs of our own stack, logged without noise on a cluster where some constants are other than the profile's."""
    profile = find_profile("craton", H100.gpu)
    logs = np.array(profile.log_constants)
    for name, value in constants.items():
        logs[INDEX[name]] = math.log(value)
    model = StepModel(model_preset("llama-3.1-8b"), 8192, batch, H100.rates, H100.network, profile.traits)
    scale = math.exp(profile.log_scale)
    return [
        LoggedRun(str(layout), terms, H100, scale * float(compose(terms, np.exp(logs)).step_seconds))
        for layout, terms in ((layout, model.terms(layout)) for layout in layouts)
    ]


# --- learning


@pytest.mark.parametrize(("family", "card"), [("torchtitan", "A100-80-SXM"), ("llm-foundry", "H100-SXM")])
def test_three_rows_of_a_stranger_improve_the_prediction_of_a_fourth(family: str, card: str) -> None:
    runs = published(family, card)[:30]
    start = find_profile("craton", runs[0].machine.gpu)
    before, after = [], []
    for seed in range(4):
        *three, fourth = random.Random(seed).sample(runs, 4)
        ours = calibrate(three, "craton").profile
        before.append(abs(predict(start, fourth.terms).seconds / fourth.step_seconds - 1))
        after.append(abs(predict(ours, fourth.terms).seconds / fourth.step_seconds - 1))
    assert statistics.mean(after) < 0.9 * statistics.mean(before)
    assert statistics.median(after) < 0.1


@pytest.mark.slow
def test_five_rows_through_calibrate_bring_strangers_under_10_percent() -> None:
    """The promise of the verb itself, over every stack with eight or more published runs on a card."""
    groups: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for case in corpus():
        groups[case.family, case.machine.gpu].append(case)
    errors, inside = [], []
    for cases in groups.values():
        runs = {run.name: run for run in published(cases[0].family, cases[0].machine.gpu)}
        for seed in (0, 1, 2) if len(cases) >= 8 else ():
            handed = random.Random(seed).sample(cases, 5)
            repeated = {case.dup_group for case in handed}
            profile = calibrate([runs[case.id] for case in handed], "craton").profile
            for case in cases:
                if case.dup_group not in repeated:
                    step = predict(profile, runs[case.id].terms)
                    errors.append(abs(step.seconds / case.measured_step_seconds - 1))
                    inside.append(step.low <= case.measured_step_seconds <= step.high)
    assert statistics.median(errors) <= 0.10
    assert 0.72 <= statistics.mean(inside) <= 0.92


def test_what_was_logged_is_met_and_the_interval_narrows() -> None:
    runs = simulated({"gemm_efficiency": 0.7, "attention_efficiency": 0.6}, [Layout(fsdp=64), Layout(fsdp=32, tp=2)])
    runs += simulated({"gemm_efficiency": 0.7, "attention_efficiency": 0.6}, [Layout(pp=2, fsdp=32, zero=1)])
    result = calibrate(runs, "craton", name="ours")
    measured = [run.step_seconds for run in runs]
    assert result.after == pytest.approx(measured, rel=0.07)
    assert max(abs(before / now - 1) for before, now in zip(result.before, measured, strict=True)) > 0.1
    profile = result.profile
    assert (profile.name, profile.gpu, profile.calibrated, profile.rows) == ("ours", "H100-SXM", True, 3)
    before = predict(find_profile("craton", H100.gpu), runs[0].terms)
    after = predict(profile, runs[0].terms)
    assert after.high / after.low < 0.9 * before.high / before.low
    assert after.seconds == pytest.approx(result.after[0])
    assert np.linalg.eigvalsh(np.array(profile.covariance)).min() > -1e-9


def test_contradictory_runs_widen_the_interval_and_consistent_ones_narrow_it() -> None:
    """Eight repetitions of four layouts that agree to the percent, or differ by half: no constant explains that."""
    layouts = [Layout(fsdp=64), Layout(fsdp=32, tp=2), Layout(pp=2, fsdp=32, zero=1), Layout(fsdp=64, micro_batch=2)]
    runs = simulated({"gemm_efficiency": 0.8}, layouts) * 2
    factors = {}
    for spread in (0.01, 0.2):
        signs = [1.0, -1.0, -1.0, 1.0, -1.0, 1.0, 1.0, -1.0]
        noisy = [
            replace(run, step_seconds=run.step_seconds * math.exp(spread * sign))
            for run, sign in zip(runs, signs, strict=True)
        ]
        profile = calibrate(noisy, "craton").profile
        factors[spread] = (profile.unexplained_factor, predict(profile, runs[0].terms).log_deviation)
    assert factors[0.01][0] < 1.0 < 2.0 < factors[0.2][0]
    assert factors[0.2][1] > 2.0 * factors[0.01][1]


def test_runs_that_say_what_the_profile_says_change_nothing() -> None:
    runs = simulated({}, [Layout(fsdp=64), Layout(fsdp=32, tp=2), Layout(pp=2, fsdp=32, zero=1)])
    result = calibrate(runs, "craton")
    assert result.profile.log_constants == pytest.approx(find_profile("craton", H100.gpu).log_constants, abs=0.01)
    assert result.before == pytest.approx(result.after, rel=0.005)


def test_what_the_runs_cannot_tell_is_named() -> None:
    same_kind = simulated({"gemm_efficiency": 0.7}, [Layout(fsdp=64)], 64) + simulated(
        {"gemm_efficiency": 0.7}, [Layout(fsdp=64), Layout(fsdp=64, micro_batch=2)], 256
    )
    result = calibrate(same_kind, "craton")
    assert "attention_efficiency" in result.unidentified  # it matters, and moves with the products
    assert not {"bubble", "tensor_exposed", "fp8_efficiency", "expert_efficiency"} & {
        *result.identified,
        *result.unidentified,
    }  # no pipeline, no tensor parallelism, no fp8, no experts: nothing to say about them
    assert not set(result.identified) & set(result.unidentified)
    assert result.profile.unidentified == tuple(result.unidentified)


def test_a_pipeline_tells_its_bubble() -> None:
    layouts = [Layout(pp=8, fsdp=8, zero=1), Layout(pp=4, fsdp=16, zero=1), Layout(fsdp=64), Layout(pp=2, fsdp=32)]
    result = calibrate(simulated({"bubble": 2.5}, layouts, 64), "craton")
    assert "bubble" in result.identified
    assert math.exp(result.profile.log_constants[INDEX["bubble"]]) == pytest.approx(2.5, rel=0.25)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_fewer_than_three_runs_are_refused(count: int) -> None:
    runs = published("torchtitan", "A100-80-SXM")[:count]
    with pytest.raises(CalibrationError, match=f"{count} run.* at least {MIN_RUNS}"):
        calibrate(runs, "craton")


def test_runs_on_two_cards_are_refused() -> None:
    runs = [*published("torchtitan", "A100-80-SXM")[:2], *published("kempnerforge", "H200-SXM")[:2]]
    with pytest.raises(CalibrationError, match="A100-80-SXM and H200-SXM"):
        calibrate(runs, "craton")


def test_an_unknown_starting_profile_is_refused() -> None:
    with pytest.raises(ProfileError, match="did you mean 'torchtitan'"):
        calibrate(published("torchtitan", "A100-80-SXM")[:3], "torchtitn")


def test_a_profile_file_can_be_calibrated_further(tmp_path: Path) -> None:
    runs = published("llm-foundry", "H100-SXM")
    first = calibrate(runs[:3], "craton", name="first").profile
    save_profile(first, tmp_path / "first.json")
    second = calibrate(runs[3:8], str(tmp_path / "first.json"), name="second").profile
    assert (second.name, second.rows) == ("second", 5)
    assert predict(second, runs[9].terms).seconds == pytest.approx(runs[9].step_seconds, rel=0.1)


# --- pins


def test_a_pin_moves_a_constant_and_holds_it() -> None:
    runs = simulated({}, [Layout(fsdp=64), Layout(fsdp=32, tp=2), Layout(pp=2, fsdp=32, zero=1)])
    free = calibrate(runs, "craton")
    held = calibrate(runs, "craton", pins={"attention_efficiency": 0.5})
    index = INDEX["attention_efficiency"]
    assert held.pinned == ["attention_efficiency"]
    assert math.exp(held.profile.log_constants[index]) == pytest.approx(0.5, rel=0.05)
    assert math.exp(free.profile.log_constants[index]) > 0.7
    assert math.sqrt(held.profile.covariance[index][index]) <= PINNED_DEVIATION
    assert "attention_efficiency" not in {*held.identified, *held.unidentified}
    # the runs still have to come out: what attention takes more, something else takes less
    assert held.after == pytest.approx(free.after, rel=0.03)


def pins_of(tmp_path: Path, document: object, machine: MachineRates = H100) -> dict[str, float]:
    path = tmp_path / "pins.json"
    path.write_text(json.dumps(document))
    return load_pins(path, machine)


def test_stated_pins(tmp_path: Path) -> None:
    assert pins_of(tmp_path, {"constants": {"bubble": 1.5, "straggle": 1}}) == {"bubble": 1.5, "straggle": 1.0}
    assert pins_of(tmp_path, {}) == {}


def test_a_measured_product_is_an_efficiency(tmp_path: Path) -> None:
    curve = gemm_seconds(8192, 8192, 4096, "bf16", H100.rates)
    entries = [{"m": 8192, "n": 8192, "k": 4096, "seconds": curve * factor} for factor in (1.25, 1.2, 4.0)]
    assert pins_of(tmp_path, {"gemm": entries}) == {"gemm_efficiency": pytest.approx(0.8)}
    fp8 = gemm_seconds(8192, 8192, 4096, "fp8", H100.rates)
    entry = {"m": 8192, "n": 8192, "k": 4096, "precision": "fp8", "seconds": 2 * fp8}
    assert pins_of(tmp_path, {"gemm": [entry]}) == {"fp8_efficiency": pytest.approx(0.5)}


def test_measured_attention_is_an_efficiency(tmp_path: Path) -> None:
    curve = attention_seconds(2, 4096, 4096, 32, 8, 128, H100.rates, backward=True)
    entry = {"batch": 2, "sequence": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "backward": True}
    assert pins_of(tmp_path, {"attention": [{**entry, "seconds": curve / 0.6}]}) == {
        "attention_efficiency": pytest.approx(0.6)
    }


def test_measured_collectives_are_slowdowns_near_and_far(tmp_path: Path) -> None:
    entries = [
        {
            "operation": "all_reduce",
            "bytes": 1e9,
            "ranks": ranks,
            "seconds": slowdown * all_reduce_seconds(1e9, group_of(ranks, 1, H100.network), H100.network),
        }
        for ranks, slowdown in ((8, 1.5), (64, 2.0))
    ]
    assert pins_of(tmp_path, {"collectives": entries}) == {
        "nvlink_slowdown": pytest.approx(1.5),
        "network_slowdown": pytest.approx(2.0),
    }


def test_a_stated_constant_wins_over_a_measured_one(tmp_path: Path) -> None:
    entry = {"m": 8192, "n": 8192, "k": 4096, "seconds": 1.0}
    assert pins_of(tmp_path, {"gemm": [entry], "constants": {"gemm_efficiency": 0.7}}) == {"gemm_efficiency": 0.7}


GEMM = {"m": 8192, "n": 8192, "k": 8192, "seconds": 1e-3}
REDUCE = {"operation": "all_reduce", "bytes": 1e9, "ranks": 8, "seconds": 1e-2}
BAD_PINS: dict[str, object] = {
    "a list": [],
    "an unknown constant": {"constants": {"gemm_efficency": 0.8}},
    "constants as a list": {"constants": [0.8]},
    "a constant of zero": {"constants": {"bubble": 0}},
    "a negative constant": {"constants": {"bubble": -1}},
    "a word": {"constants": {"bubble": "large"}},
    "a boolean": {"constants": {"bubble": True}},
    "no number": {"constants": {"bubble": math.nan}},
    "an infinite one": {"constants": {"bubble": math.inf}},
    "a product without a shape": {"gemm": [{"seconds": 1.0}]},
    "a product that took no time": {"gemm": [{**GEMM, "seconds": 0}]},
    "a product that took less than none": {"gemm": [{**GEMM, "seconds": -1}]},
    "a product that took for ever": {"gemm": [{**GEMM, "seconds": math.inf}]},
    "a product that is a word": {"gemm": ["fast"]},
    "products that are a number": {"gemm": 5},
    "an unknown precision": {"gemm": [{**GEMM, "precision": "int3"}]},
    "an unknown collective": {"collectives": [{**REDUCE, "operation": "all_hands"}]},
    "a collective of one rank": {"collectives": [{**REDUCE, "ranks": 1}]},
    "attention without a width": {"attention": [{"batch": 1, "sequence": 4096, "heads": 8, "seconds": 1.0}]},
    "an unknown section": {"gems": [GEMM]},
}


@pytest.mark.parametrize("case", BAD_PINS)
def test_a_bad_microbenchmark_file_is_one_clear_error(tmp_path: Path, case: str) -> None:
    with pytest.raises(CalibrationError, match=r"pins\.json"):
        pins_of(tmp_path, BAD_PINS[case])


def test_an_unknown_constant_gets_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="did you mean 'gemm_efficiency'"):
        pins_of(tmp_path, {"constants": {"gemm_efficency": 0.8}})


def test_a_microbenchmark_file_that_is_not_there_or_no_json(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"nothing\.json"):
        load_pins(tmp_path / "nothing.json", H100)
    (tmp_path / "pins.json").write_text("{")
    with pytest.raises(CalibrationError, match=r"pins\.json"):
        load_pins(tmp_path / "pins.json", H100)


# --- files of logged runs


@pytest.fixture
def write_runs(tmp_path: Path) -> Callable[[object], Path]:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "fixed.yaml").write_text(JOB + "layout: {fsdp: 8}\n")
    (tmp_path / "serve.yaml").write_text("kind: serve\nmodel: llama-3.1-8b\ncluster: p5.48xlarge x 1\n")
    (tmp_path / "function.yaml").write_text(JOB.replace("llama-3.1-8b", "my.models:build"))
    shared = JOB.replace("p5.48xlarge x 1", "local x 4") + "run: {share_gpus: true}\n"
    (tmp_path / "shared.yaml").write_text(shared)

    def write(document: object) -> Path:
        path = tmp_path / "runs.json"
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        return path

    return write


def test_runs_in_the_form_of_published_ones(write_runs: Callable[[object], Path]) -> None:
    names = [run.name for run in published("torchtitan", "A100-80-SXM")[:3]]
    for document in ([BY_ID[name] for name in names], {"cases": [BY_ID[name] for name in names]}):
        runs = load_runs(write_runs(document), "craton")
        assert [run.name for run in runs] == names
        assert runs[0].machine.gpu.name == "A100-80-SXM"
        assert runs[0].step_seconds == published("torchtitan", "A100-80-SXM")[0].step_seconds


def test_runs_as_job_files_with_their_layout_and_steps(write_runs: Callable[[object], Path]) -> None:
    path = write_runs(
        {
            "runs": [
                {"job": "fixed.yaml", "step_seconds": 2.5},
                {"job": "job.yaml", "step_seconds": [90.0, 2.4, 2.6, 2.5, 2.5], "layout": {"fsdp": 4, "tp": 2}},
                {"job": "job.yaml", "step_seconds": 2.7, "layout": {"tp": 8}, "name": "with tp 8"},
            ]
        }
    )
    runs = load_runs(path, "craton")
    assert [run.step_seconds for run in runs] == [2.5, 2.5, 2.7]  # the median: a first step compiles
    assert runs[2].name == "with tp 8"
    assert "tp 2" in runs[1].name
    assert calibrate(runs, "craton").profile.gpu == "H100-SXM"


def test_a_calibrated_profile_plans_what_was_logged(write_runs: Callable[[object], Path], tmp_path: Path) -> None:
    """End to end: log, calibrate, plan the same jobs, get the logged seconds."""
    layouts: list[dict[str, Any]] = [{"fsdp": 8}, {"fsdp": 4, "tp": 2}, {"fsdp": 8, "recompute": "full"}]
    entries = []
    for position, layout in enumerate(layouts):
        (tmp_path / f"{position}.yaml").write_text(f"{JOB}layout: {json.dumps(layout)}\n")
        usual = plan(load_job(tmp_path / f"{position}.yaml"), today=TODAY).step_seconds
        entries.append({"job": "job.yaml", "step_seconds": 1.3 * usual, "layout": layout})
    save_profile(calibrate(load_runs(write_runs(entries), "craton"), "craton").profile, tmp_path / "ours.json")
    for position, entry in enumerate(entries):
        job = tmp_path / f"{position}.yaml"
        job.write_text(job.read_text() + "software: ours.json\n")
        answer = plan(load_job(job), today=TODAY)
        assert answer.calibrated
        assert answer.step_seconds == pytest.approx(entry["step_seconds"], rel=0.05)


def test_experts_are_calibrated_as_they_are_planned(write_runs: Callable[[object], Path], tmp_path: Path) -> None:
    """The plan takes experts to be out of balance; a calibration that does not would count it twice."""
    text = JOB.replace("llama-3.1-8b", "qwen3-30b-a3b") + "layout: {fsdp: 8, ep: 8}\n"
    (tmp_path / "moe.yaml").write_text(text)
    job = load_job(tmp_path / "moe.yaml")
    planned = plan(job, today=TODAY)
    run = load_runs(write_runs([{"job": "moe.yaml", "step_seconds": 1.0}]), "craton")[0]
    found = predict(find_profile("craton", run.machine.gpu), run.terms).seconds
    assert found == pytest.approx(
        planned.step_seconds - planned.phases["checkpoint"] - planned.phases["data"], rel=1e-6
    )


GOOD = {"job": "job.yaml", "step_seconds": 2.5, "layout": {"fsdp": 8}}
ROW = BY_ID["mosaic-a100_40gb-mpt70b-s2048-128g-mb4-bf16"]
BAD_RUNS: dict[str, object] = {
    "not JSON": "{",
    "empty": "",
    "a number": 3,
    "an object without runs": {"jobs": []},
    "runs that are no objects": [1, 2, 3],
    "an unknown key": [{**GOOD, "seconds": 1}],
    "no step time": [{"job": "job.yaml", "layout": {"fsdp": 8}}],
    "a step of no time": [{**GOOD, "step_seconds": 0}],
    "a negative step": [{**GOOD, "step_seconds": -1}],
    "a step that never ends": [{**GOOD, "step_seconds": math.inf}],
    "a step of no number": [{**GOOD, "step_seconds": math.nan}],
    "a step that is a boolean": [{**GOOD, "step_seconds": True}],
    "a step that is a word": [{**GOOD, "step_seconds": "fast"}],
    "no steps": [{**GOOD, "step_seconds": []}],
    "a word among the steps": [{**GOOD, "step_seconds": [1.0, "fast"]}],
    "layout auto": [{"job": "job.yaml", "step_seconds": 2.5}],
    "a layout that is a word": [{**GOOD, "layout": "auto"}],
    "a layout that is a list": [{**GOOD, "layout": [8]}],
    "an unknown key in the layout": [{**GOOD, "layout": {"fsdpp": 8}}],
    "a layout with a word for a size": [{**GOOD, "layout": {"fsdp": "many"}}],
    "a layout that does not fit the cluster": [{**GOOD, "layout": {"fsdp": 7}}],
    "a layout that cannot be filled": [{**GOOD, "layout": {"tp": 3}}],
    "a job that is not there": [{**GOOD, "job": "nothing.yaml"}],
    "a job that is no name": [{**GOOD, "job": {}}],
    "a job that serves": [{**GOOD, "job": "serve.yaml"}],
    "a model that is a function": [{**GOOD, "job": "function.yaml"}],
    "ranks that share a GPU": [{**GOOD, "job": "shared.yaml"}],
    "a published run without a step time": [{**ROW, "measured": None, "derived": None}],
    "a published run with half a micro-batch": [{**ROW, "micro_batch": 0.5}],
    "a published run with an endless batch": [{**ROW, "global_batch": math.inf}],
    "a published run that took less than no time": [{**ROW, "derived": {"step_time_s": -1}}],
    "a published run on an unknown card": [{**ROW, "hardware": {**ROW["hardware"], "gpu": "TPU"}}],
}


@pytest.mark.parametrize("case", BAD_RUNS)
def test_a_bad_file_of_runs_is_one_clear_error(write_runs: Callable[[object], Path], case: str) -> None:
    with pytest.raises(CratonError) as caught:
        load_runs(write_runs(BAD_RUNS[case]), "craton")
    assert "\n" not in str(caught.value)
    # an error of the job file itself names that file, every other one the file of runs
    assert isinstance(caught.value, JobError) or "runs.json" in str(caught.value)


def test_an_error_names_the_run(write_runs: Callable[[object], Path]) -> None:
    with pytest.raises(CalibrationError, match=r"runs\.json: run 2: step_seconds must be a positive number"):
        load_runs(write_runs([GOOD, {**GOOD, "step_seconds": -1}]), "craton")


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="no such file"):
        load_runs(tmp_path / "runs.json", "craton")
    with pytest.raises(CalibrationError, match=tmp_path.name):
        load_runs(tmp_path, "craton")


def test_a_saved_calibration_predicts_the_same(tmp_path: Path) -> None:
    runs = published("torchtitan", "A100-80-SXM")
    profile = calibrate(runs[:4], "craton").profile
    save_profile(profile, tmp_path / "profile.json")
    again = find_profile(str(tmp_path / "profile.json"), gpu("A100-80-SXM"))
    assert again == load_profile(tmp_path / "profile.json")
    assert predict(again, runs[5].terms).seconds == pytest.approx(predict(profile, runs[5].terms).seconds, rel=2e-3)
    assert len(again.log_constants) == len(NAMES)
