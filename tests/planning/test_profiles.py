"""Software profiles: found by name and GPU, sane as shipped, and the same after a round trip through a file."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from craton.errors import CratonError
from craton.infrastructure import Gpu, cluster_of
from craton.infrastructure.catalog import gpu, gpus
from craton.job import load_job
from craton.job.layout import Layout
from craton.job.model import model_preset
from craton.planning import CONSTANTS, plan
from craton.planning.calibration import find_profile, own_runs, predict, save_profile, with_traits
from craton.planning.calibration.profiles import ENOUGH_ROWS, ProfileError, load_profile, software_names
from craton.planning.rates import machine_of
from craton.planning.software import INDEX, NAMES, SoftwareProfile
from craton.planning.step import StepModel, StepTerms

CARDS: list[Gpu] = [gpu(entry.name) for entry in gpus()]
UNKNOWN_CARD = Gpu("Z9000", "rubin", {"bf16": 4e15}, {}, 3e11, 2e13, 1.8e12, 1800)
JOB = """\
kind: pretrain
model: llama-3.1-8b
data: {sequence: 8192}
train: {global_batch_sequences: 32, steps: 1000}
cluster: p5.48xlarge x 1
"""


@cache
def a_step() -> StepTerms:
    place = machine_of(cluster_of("p5.48xlarge", 4))
    profile = find_profile("craton", place.gpu)
    model = StepModel(model_preset("llama-3.1-8b"), 8192, 128, place.rates, place.network, profile.traits)
    return model.terms(Layout(fsdp=32))


@pytest.mark.parametrize("name", software_names())
def test_every_stack_has_a_sane_profile_on_every_card(name: str) -> None:
    for card in [*CARDS, UNKNOWN_CARD]:
        profile = find_profile(name, card)
        assert len(profile.log_constants) == len(NAMES) == len(CONSTANTS)
        for constant, log in zip(CONSTANTS, profile.log_constants, strict=True):
            assert math.isfinite(log)
            assert abs(log - math.log(constant.prior)) < 5 * constant.spread + 1.7, (card.name, constant.name)
        matrix = np.array(profile.covariance)
        assert np.allclose(matrix, matrix.T)
        assert np.linalg.eigvalsh(matrix).min() > -1e-9
        assert matrix.shape == (len(NAMES) + 1, len(NAMES) + 1)  # the scale is the last
        assert abs(profile.log_scale) < 0.3
        assert 0.05 < predict(profile, a_step()).log_deviation < 0.4


def test_every_shipped_profile_is_of_a_known_stack() -> None:
    path = resources.files("craton.planning.calibration").joinpath("profiles.json")
    document = json.loads(path.read_text(encoding="utf-8"))
    assert {entry["name"] for entry in document["profiles"]} == set(software_names())


@pytest.mark.parametrize("name", software_names())
def test_a_published_card_is_surer_than_one_nobody_published(name: str) -> None:
    unknown = np.diag(find_profile(name, UNKNOWN_CARD).covariance)
    for card in CARDS:
        profile = find_profile(name, card)
        variance = np.diag(profile.covariance)
        assert (variance <= unknown * 1.001).all()
        if profile.calibrated:
            assert profile.rows >= 3
            assert variance[INDEX["gemm_efficiency"]] < 0.95 * unknown[INDEX["gemm_efficiency"]]


def test_our_own_stack_is_calibrated_only_where_it_was_measured() -> None:
    measured = Counter(gpu(run.gpu).name for run in own_runs())
    for card in CARDS:
        assert find_profile("craton", card).calibrated == (measured[card.name] >= ENOUGH_ROWS)


def test_a_profile_says_whose_and_where() -> None:
    assert find_profile("torchtitan", gpu("A100-80-SXM")).label == "torchtitan on A100-80-SXM"
    assert find_profile("craton", gpu("H100-SXM")).label == "craton"


@pytest.mark.parametrize(("given", "near"), [("torchtitn", "torchtitan"), ("Megatron-LM", "megatron-lm")])
def test_an_unknown_name_gets_the_nearest_one(given: str, near: str) -> None:
    with pytest.raises(ProfileError, match=f"{given}.*did you mean '{near}'") as caught:
        find_profile(given, gpu("H100-SXM"))
    assert "craton calibrate" in str(caught.value)
    assert isinstance(caught.value, CratonError)


def test_a_profile_survives_a_file(tmp_path: Path) -> None:
    step = a_step()
    for name in software_names():
        profile = replace(find_profile(name, gpu("H100-SXM")), unidentified=("bubble",))
        save_profile(profile, tmp_path / "profile.json")
        again = load_profile(tmp_path / "profile.json")
        assert (again.name, again.gpu, again.traits, again.unidentified) == (
            profile.name,
            profile.gpu,
            profile.traits,
            ("bubble",),
        )
        assert (again.calibrated, again.rows, again.source) == (profile.calibrated, profile.rows, profile.source)
        before, after = predict(profile, step), predict(again, step)
        assert after.seconds == pytest.approx(before.seconds, rel=2e-3)
        assert after.log_deviation == pytest.approx(before.log_deviation, rel=2e-3)
        assert np.linalg.eigvalsh(np.array(again.covariance)).min() > -1e-6


def test_a_profile_file_can_be_read_by_people(tmp_path: Path) -> None:
    save_profile(find_profile("torchtitan", gpu("A100-80-SXM")), tmp_path / "profile.json")
    document = json.loads((tmp_path / "profile.json").read_text(encoding="utf-8"))
    assert document["constants"]["gemm_efficiency"]["value"] == pytest.approx(0.9, abs=0.15)
    assert set(document["constants"]) == set(NAMES)


def _without(key: str) -> Callable[[dict[str, Any]], object]:
    return lambda document: document.pop(key)


def _constant(value: object) -> Callable[[dict[str, Any]], object]:
    return lambda document: document["constants"]["bubble"].update(value=value)


TORN: dict[str, Callable[[dict[str, Any]], object]] = {
    **{
        f"no {key}": _without(key)
        for key in ("name", "gpu", "traits", "constants", "covariance", "log_scale", "format")
    },
    "another format": lambda document: document.update(format=99),
    "a constant missing": lambda document: document["constants"].pop("bubble"),
    "a constant too many": lambda document: document["constants"].update(luck={"value": 1.0}),
    "a constant that is negative": _constant(-1.0),
    "a constant that is zero": _constant(0),
    "a constant that is a word": _constant("fast"),
    "a constant that is no number": _constant(math.nan),
    "a constant that is infinite": _constant(math.inf),
    "an unknown trait": lambda document: document["traits"].update(speed="high"),
    "a trait with an unknown value": lambda document: document["traits"].update(selective="sometimes"),
    "half a covariance": lambda document: document.update(covariance=document["covariance"][:3]),
    "a covariance that is no matrix": lambda document: document.update(covariance=7),
    "a covariance with no number": lambda document: document["covariance"][0].__setitem__(0, math.nan),
    "a scale that is no number": lambda document: document.update(log_scale=math.nan),
    "constants that are a list": lambda document: document.update(constants=[1, 2]),
}


@pytest.mark.parametrize("case", TORN)
def test_a_file_that_is_no_profile_is_one_clear_error(tmp_path: Path, case: str) -> None:
    path = tmp_path / "profile.json"
    save_profile(find_profile("craton", gpu("H100-SXM")), path)
    document = json.loads(path.read_text(encoding="utf-8"))
    TORN[case](document)
    path.write_text(json.dumps(document))
    with pytest.raises(ProfileError, match=r"profile\.json"):
        load_profile(path)


def test_a_profile_with_traits_of_another_version_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(find_profile("craton", gpu("H100-SXM")), path)
    document = json.loads(path.read_text(encoding="utf-8"))
    del document["traits"]["zero_bubble"]
    path.write_text(json.dumps(document))
    with pytest.raises(ProfileError, match="traits do not match this version; run `craton calibrate` again"):
        load_profile(path)


def test_a_stack_run_with_another_feature_moves_as_its_prior() -> None:
    profile = find_profile("megatron-bridge", gpu("GB200"))
    fused = with_traits(profile, replace(profile.traits, fused_experts=True))
    moved = np.array(fused.log_constants) - np.array(profile.log_constants)
    assert moved[INDEX["dispatch_seconds"]] == pytest.approx(math.log(0.1))
    assert moved[INDEX["gemm_efficiency"]] == 0.0
    assert with_traits(fused, profile.traits) == replace(profile, log_constants=pytest.approx(profile.log_constants))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"profile"', "[" * 100_000], ids=lambda text: text[:9])
def test_a_torn_file_is_one_clear_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.json"
    save_profile(find_profile("craton", gpu("H100-SXM")), path)
    path.write_text(text or path.read_text(encoding="utf-8")[:200])
    with pytest.raises(ProfileError, match=r"profile\.json"):
        load_profile(path)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="no such profile file"):
        find_profile(str(tmp_path / "profile.json"), gpu("H100-SXM"))
    with pytest.raises(ProfileError, match=tmp_path.name):
        load_profile(tmp_path)


def own_profile(tmp_path: Path, **changes: Any) -> SoftwareProfile:
    """A profile of ours with matrix products at half of the usual efficiency, on H100."""
    start = find_profile("craton", gpu("H100-SXM"))
    logs = list(start.log_constants)
    logs[INDEX["gemm_efficiency"]] = math.log(0.45)
    profile = replace(start, name="ours", gpu="H100-SXM", log_constants=tuple(logs), calibrated=True, **changes)
    save_profile(profile, tmp_path / "profile.json")
    return profile


def test_a_job_can_name_a_profile_file(tmp_path: Path) -> None:
    own_profile(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB + "layout: {fsdp: 8}\nsoftware: profile.json\n")
    (tmp_path / "usual.yaml").write_text(JOB + "layout: {fsdp: 8}\n")
    ours, usual = (plan(load_job(tmp_path / name), today=date(2026, 11, 15)) for name in ("job.yaml", "usual.yaml"))
    assert (ours.profile, ours.calibrated) == ("ours on H100-SXM", True)
    assert 1.4 < ours.step_seconds / usual.step_seconds < 2.1


def test_a_profile_of_another_card_is_not_called_calibrated(tmp_path: Path) -> None:
    """Constants of an H100 say less about a B200, and the plan has to admit it."""
    own_profile(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB.replace("p5.", "p6-b200.") + "software: profile.json\n")
    answer = plan(load_job(tmp_path / "job.yaml"), today=date(2026, 11, 15))
    assert not answer.calibrated or any("H100-SXM" in warning for warning in answer.warnings)
