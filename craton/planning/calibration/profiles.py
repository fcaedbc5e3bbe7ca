"""Software profiles by name: shipped ones, fitted to published runs, and a team's own from `craton calibrate`.

A profile is looked up for a GPU. Where a stack was never published on that GPU, its constants come from what it does
elsewhere and from other stacks on that generation; an unknown stack gets the priors of the generation. The covariance
states the uncertainty in both cases.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import numpy as np

from craton.errors import CratonError
from craton.infrastructure import Gpu
from craton.job import Job
from craton.nearest import did_you_mean
from craton.planning.calibration.cpu_profile import cpu_profile
from craton.planning.fitting import (
    EXPERT_NOISE,
    EXPERT_UNSHARED,
    NOISE,
    QUANTILE_80,
    TAIL_WIDTH,
    UNSHARED,
    Fit,
    Prediction,
    linearise_one,
)
from craton.planning.software import NAMES, AttentionKernel, Dispatcher, Selective, SoftwareProfile, Traits, prior_log
from craton.planning.step import TRAINING_STEP, StepTerms

UNKNOWN = "craton"  # Craton's own stack: fitted to data/craton_runs.json if it has rows, else the priors of its traits
OWN_CLUSTER = 0.07  # spread of log(step) between a publisher's cluster and a reader's with the same software
ENOUGH_ROWS = 3  # published runs of a stack on a GPU from which its profile counts as calibrated
FORMAT = 1


class ProfileError(CratonError):
    """A software profile that does not exist or cannot be read."""


# Default traits of each stack, for planning.
STACKS: dict[str, Traits] = {
    UNKNOWN: Traits(
        selective="element-wise",
        chunked_head=True,
        zero_bubble=True,
        repeats_gate=True,
        saves_both_widths=False,
        fsdp2=True,
        own_layers=True,
        multi_token=False,
        no_host_waits=True,
    ),
    "torchtitan": Traits(
        attention="flash2", selective="operators", tensor_overlap=True, master_gradients=True, zero_bubble=True
    ),
    "megatron-bridge": Traits(tensor_overlap=True, dispatcher="deepep", selective="modules"),
    "nemo": Traits(tensor_overlap=True, selective="modules", master_gradients=True),
    "nemo-automodel": Traits(compiled=False, dispatcher="deepep", selective="operators"),
    "megatron-lm": Traits(tensor_overlap=True, master_gradients=True),
    "nanotron": Traits(attention="flash2", compiled=False, tensor_overlap=True, master_gradients=True),
    "llm-foundry": Traits(attention="flash2", compiled=False),
    "kempnerforge": Traits(attention="flash2", selective="operators"),
    "fms-fsdp": Traits(attention="flash2", selective="operators"),
}


# Allowed values of each trait.
TRAIT_VALUES: dict[str, tuple[object, ...]] = {
    field.name: {
        "attention": get_args(AttentionKernel),
        "dispatcher": get_args(Dispatcher),
        "selective": get_args(Selective),
    }.get(field.name, (True, False))
    for field in fields(Traits)
}


def software_names() -> list[str]:
    return sorted(STACKS)


def check_software(job: Job) -> None:
    """Raise ProfileError, with the line, if a job names a stack that has no profile."""
    if job.software in STACKS or Path(job.software).suffix == ".json" or "/" in job.software:
        return
    raise _unknown(job.software, job.where("software"))


def find_profile(software: str, card: Gpu) -> SoftwareProfile:
    """The profile of a stack, or of a profile file, on a GPU."""
    if Path(software).suffix == ".json" or "/" in software:
        return load_profile(software)
    if software not in STACKS:
        raise _unknown(software)
    if software == UNKNOWN and card.cpu is not None:
        return cpu_profile(software, STACKS[UNKNOWN], card)
    for gpu, generation in ((card.name, None), ("", card.generation), ("", "")):
        for position, entry in enumerate(_shipped()):
            is_generation = generation is None or entry["generation"] == generation
            if entry["name"] == software and entry["gpu"] == gpu and is_generation:
                return _shipped_profile(position)
    raise AssertionError(f"profiles.json has no entry for {software} without a GPU")


def predict(profile: SoftwareProfile, terms: StepTerms) -> Prediction:
    """A step's median and spread under a profile."""
    value, jacobian = linearise_one(TRAINING_STEP, terms, np.array(profile.log_constants))
    slope = np.append(jacobian, 1.0)  # the scale moves every step alike
    rest = profile.unexplained_factor * unexplained(terms)
    variance = float(slope @ np.array(profile.covariance) @ slope) + profile.own_cluster**2 + rest**2
    return Prediction(math.exp(value + profile.log_scale), math.sqrt(variance))


def with_traits(profile: SoftwareProfile, traits: Traits) -> SoftwareProfile:
    """Return the profile of the same stack run with other features: its constants move as their priors do."""
    moves = zip(profile.log_constants, prior_log(traits), prior_log(profile.traits), strict=True)
    return replace(profile, traits=traits, log_constants=tuple(log + new - old for log, new, old in moves))


def unexplained(terms: StepTerms) -> float:
    """Return the standard deviation of log(step) that no constant of a stack explains."""
    has_experts = bool(terms.layer.dispatches[0])
    unshared = UNSHARED * (EXPERT_UNSHARED if has_experts else 1.0)
    return math.hypot(unshared, TAIL_WIDTH * NOISE * (EXPERT_NOISE if has_experts else 1.0))


def interval_factor(prediction: Prediction) -> float:
    return math.exp(QUANTILE_80 * prediction.log_deviation)


def profile_from_fit(
    fit: Fit[StepTerms], software: str, card: str, labels: dict[str, str], traits: Traits, rows: int, source: str
) -> SoftwareProfile:
    """Return the profile of one stack on one GPU from a fit."""
    mean, covariance = fit.posterior(labels, prior_log(traits))
    return SoftwareProfile(
        name=software,
        gpu=card,
        traits=traits,
        log_constants=tuple(float(x) for x in mean[:-1]),
        log_scale=float(mean[-1]),
        covariance=tuple(tuple(float(x) for x in line) for line in covariance),
        own_cluster=OWN_CLUSTER,
        calibrated=rows >= ENOUGH_ROWS,
        source=source,
        rows=rows,
    )


def profile_json(profile: SoftwareProfile) -> dict[str, Any]:
    """Return a profile as readable JSON: constants by name, the covariance as its lower triangle."""
    matrix = profile.covariance
    return {
        "format": FORMAT,
        "name": profile.name,
        "gpu": profile.gpu,
        "calibrated": profile.calibrated,
        "rows": profile.rows,
        "source": profile.source,
        "traits": asdict(profile.traits),
        "constants": {
            name: {"value": _short(math.exp(log)), "log_deviation": _short(math.sqrt(max(matrix[i][i], 0.0)))}
            for i, (name, log) in enumerate(zip(NAMES, profile.log_constants, strict=True))
        },
        "log_scale": _short(profile.log_scale),
        "own_cluster": _short(profile.own_cluster),
        "unexplained_factor": _short(profile.unexplained_factor),
        "unidentified": list(profile.unidentified),
        "covariance": [[_short(x) for x in line[: i + 1]] for i, line in enumerate(matrix)],
    }


def profile_from_json(entry: dict[str, Any]) -> SoftwareProfile:
    constants = entry["constants"]
    missing = [name for name in NAMES if name not in constants]
    if missing or len(constants) != len(NAMES):
        raise ValueError(f"constants do not match this version; missing: {', '.join(missing) or 'none'}")
    triangle = entry["covariance"]
    size = len(NAMES) + 1  # the scale is the last
    matrix = [[triangle[max(i, j)][min(i, j)] for j in range(size)] for i in range(size)]
    factor = entry.get("unexplained_factor", 1.0)  # older files have none
    numbers = [*(constants[name]["value"] for name in NAMES), entry["log_scale"], entry["own_cluster"], factor]
    if not all(math.isfinite(float(number)) for line in (numbers, *matrix) for number in line):
        raise ValueError("a constant, the scale or the covariance is not a finite number")
    if set(entry["traits"]) != {field.name for field in fields(Traits)}:
        raise ValueError("traits do not match this version; run `craton calibrate` again")
    traits = Traits(**entry["traits"])
    for name, kind in TRAIT_VALUES.items():
        if getattr(traits, name) not in kind:
            raise ValueError(
                f"trait {name} {getattr(traits, name)!r} is not known; allowed: {', '.join(map(str, kind))}"
            )
    return SoftwareProfile(
        name=entry["name"],
        gpu=entry["gpu"],
        traits=traits,
        log_constants=tuple(math.log(constants[name]["value"]) for name in NAMES),
        covariance=tuple(tuple(float(x) for x in line) for line in matrix),
        log_scale=float(entry["log_scale"]),
        own_cluster=float(entry["own_cluster"]),
        calibrated=bool(entry["calibrated"]),
        source=entry["source"],
        rows=int(entry["rows"]),
        unidentified=tuple(entry["unidentified"]),
        unexplained_factor=float(factor),
    )


def save_profile(profile: SoftwareProfile, path: str | Path) -> None:
    Path(path).write_text(json.dumps(profile_json(profile), indent=1) + "\n", encoding="utf-8")


def load_profile(path: str | Path) -> SoftwareProfile:
    try:
        entry = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(entry, dict) or entry.get("format") != FORMAT:
            raise ValueError("not a software profile; expected a file written by `craton calibrate`")
        return profile_from_json(entry)
    except FileNotFoundError:
        raise ProfileError(f"{path}: no such profile file") from None
    except (
        OSError,
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise ProfileError(f"{path}: cannot be used as a software profile: {error}") from None


def _unknown(software: str, where: str = "") -> ProfileError:
    hint = did_you_mean(software, STACKS)
    return ProfileError(
        f"{where}software {software!r} has no profile{hint} (allowed: {', '.join(software_names())}, or the path of a "
        "file written by `craton calibrate`)"
    )


@lru_cache(maxsize=1)
def _shipped() -> list[dict[str, Any]]:
    text = resources.files(__package__).joinpath("profiles.json").read_text(encoding="utf-8")
    profiles: list[dict[str, Any]] = json.loads(text)["profiles"]
    return profiles


@lru_cache(maxsize=64)
def _shipped_profile(position: int) -> SoftwareProfile:
    return profile_from_json(_shipped()[position])


def _short(value: float) -> float:
    return float(f"{value:.4g}")
