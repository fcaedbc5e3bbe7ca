"""Calibrate a team's own software profile from a few logged step times.

Three or more runs update the constants of a starting profile: the posterior of the same model that the published runs
were fitted with. Constants that the runs do not identify are named. Constants measured by a microbenchmark can be
pinned, so that the logged steps identify the others.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from craton.errors import CratonError
from craton.infrastructure import resolve_cluster
from craton.job import LayoutError, load_job
from craton.job.layout import LayoutSpec, check_layout
from craton.nearest import did_you_mean
from craton.planning.calibration.cases import CaseFileError, read_case
from craton.planning.calibration.profiles import find_profile, unexplained
from craton.planning.calibration.published_rows import case_machine, case_terms
from craton.planning.fitting import DAMPING, ITERATIONS, Array, linearise
from craton.planning.rates import (
    Group,
    MachineRates,
    all_gather_seconds,
    all_reduce_seconds,
    attention_seconds,
    gemm_seconds,
    machine_of,
    reduce_scatter_seconds,
)
from craton.planning.software import CONSTANTS, INDEX, SPREAD, SoftwareProfile
from craton.planning.step import REAL_IMBALANCE, TRAINING_STEP, StepModel, StepTerms, stack

MIN_RUNS = 3
NEW_CLUSTER = 0.5  # share of a constant's spread that a new cluster may add to a shipped profile
PINNED_DEVIATION = 0.03  # of the logarithm of a measured constant
FACTORS = tuple(float(factor) for factor in np.geomspace(0.5, 8.0, 25))  # on what no constant explains
USUAL_FACTOR, FACTOR_SPREAD = 0.9, 0.7  # median and spread of its logarithm: a cluster's own runs vary less, or more
IDENTIFIED = 0.8  # a constant counts as identified by the data when its deviation shrinks below this share
MATTERS = 0.01  # an unidentified constant is named when one standard deviation moves a step by this share


class CalibrationError(CratonError):
    """Runs from which no profile can be fitted."""


@dataclass(frozen=True)
class LoggedRun:
    name: str
    terms: StepTerms
    machine: MachineRates
    step_seconds: float


@dataclass(frozen=True)
class Calibration:
    profile: SoftwareProfile
    runs: list[LoggedRun]
    before: list[float]  # predicted step seconds with the starting profile
    after: list[float]
    identified: list[str]
    unidentified: list[str]  # constants that matter for these runs, but that they do not identify
    pinned: list[str]


def calibrate(
    runs: Sequence[LoggedRun], software: str, name: str = "", pins: Mapping[str, float] | None = None
) -> Calibration:
    """Fit a profile of `software` to logged runs on one kind of GPU."""
    if len(runs) < MIN_RUNS:
        raise CalibrationError(
            f"{len(runs)} run{'s' if len(runs) != 1 else ''} given; a profile needs at least {MIN_RUNS}, preferably "
            "with different layouts, models or sizes"
        )
    return calibrate_from(find_profile(software, runs[0].machine.gpu), runs, name, pins)


def calibrate_from(
    start: SoftwareProfile, runs: Sequence[LoggedRun], name: str = "", pins: Mapping[str, float] | None = None
) -> Calibration:
    """Return the posterior of a profile, given logged runs on one kind of GPU."""
    cards = sorted({run.machine.gpu.name for run in runs})
    if len(cards) > 1:
        raise CalibrationError(f"the runs are on {' and '.join(cards)}; a profile covers one GPU: use one file per GPU")
    widened = np.append((NEW_CLUSTER * np.array(SPREAD)) ** 2, start.own_cluster**2)
    mean, covariance = _pin(
        np.append(start.log_constants, start.log_scale), np.array(start.covariance) + np.diag(widened), pins or {}
    )
    target = np.log([run.step_seconds for run in runs])
    terms = stack([run.terms for run in runs])
    count = len(runs)
    rest = np.array([unexplained(run.terms) for run in runs])
    theta = mean.copy()
    factor = 1.0
    for iteration in range(ITERATIONS):
        value, jacobian = _log_steps(terms, theta, count)
        explained = jacobian @ covariance @ jacobian.T
        gap = target - value + jacobian @ (theta - mean)
        factor = _unexplained_factor(gap, explained, rest)
        gain = np.linalg.solve(explained + np.diag((factor * rest) ** 2), jacobian @ covariance).T
        theta = theta + DAMPING[min(iteration, len(DAMPING) - 1)] * (mean + gain @ gap - theta)
    posterior = covariance - gain @ jacobian @ covariance
    identified, unidentified = _identified(jacobian, covariance, posterior, pins or {})
    profile = replace(
        start,
        name=name or start.name,
        gpu=cards[0],
        log_constants=tuple(float(x) for x in theta[:-1]),
        log_scale=float(theta[-1]),
        covariance=tuple(tuple(float(x) for x in line) for line in posterior),
        own_cluster=0.0,
        calibrated=True,
        rows=count,
        source=f"{count} logged runs on {cards[0]}, starting from {start.name}",
        unidentified=tuple(unidentified),
        unexplained_factor=factor,
    )
    before, _ = _log_steps(terms, np.append(start.log_constants, start.log_scale), count)
    after, _ = _log_steps(terms, theta, count)
    return Calibration(
        profile,
        list(runs),
        [math.exp(x) for x in before],
        [math.exp(x) for x in after],
        identified,
        unidentified,
        sorted(pins or {}),
    )


def load_runs(path: str | Path, software: str) -> list[LoggedRun]:
    """Load logged runs: rows like those of a case file, or job files with their measured step times.

    `[{"job": "llama-8b.yaml", "step_seconds": 6.1, "layout": {"fsdp": 128}}, …]`; `step_seconds` may be a list of
    logged steps; the median counts. Paths are relative to the file's folder.
    """
    path = Path(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CalibrationError(f"{path}: no such file") from None
    except json.JSONDecodeError as error:
        raise CalibrationError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise CalibrationError(f"{path}: cannot be read: {error}") from None
    entries = document
    if isinstance(document, dict):
        entries = document.get("runs", document.get("cases"))
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise CalibrationError(f"{path}: expected a list of runs, or an object with a list under 'runs' or 'cases'")
    return [
        _run_of_job(entry, f"{path}: run {position}", path.parent, software)
        if "job" in entry
        else _run_of_case(entry, f"{path}: run {position}")
        for position, entry in enumerate(entries, start=1)
    ]


def load_pins(path: str | Path, machine: MachineRates) -> dict[str, float]:
    """Load constants from a microbenchmark file: given under `constants`, or from measured kernels and collectives.

    `gemm`: m, n, k, precision, seconds · `attention`: batch, sequence, heads, kv_heads, head_dim, backward, seconds ·
    `collectives`: operation, bytes, ranks, seconds. A constant is the median over its measurements.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CalibrationError(f"{path}: cannot be read as JSON: {error}") from None
    sections = ("constants", "gemm", "attention", "collectives")
    if not isinstance(document, dict) or not isinstance(document.get("constants", {}), dict):
        raise CalibrationError(f"{path}: expected an object with constants (an object), gemm, attention or collectives")
    unknown = [key for key in document if key not in sections]
    if unknown:
        raise CalibrationError(f"{path}: section {unknown[0]!r} is not known; allowed: {', '.join(sections)}")
    pins: dict[str, float] = {}
    for name, value in document.get("constants", {}).items():
        if name not in INDEX:
            raise CalibrationError(
                f"{path}: constant {name!r} is not known{did_you_mean(name, INDEX)}; allowed: {', '.join(INDEX)}"
            )
        if not _is_positive(value):
            raise CalibrationError(f"{path}: constant {name} must be a positive number, not {value!r}")
        pins[name] = float(value)
    ratios: dict[str, list[float]] = {}
    try:
        for entry in document.get("gemm") or []:
            precision = entry.get("precision", "bf16")
            name = {"fp8": "fp8_efficiency", "mxfp8": "mxfp8_efficiency", "nvfp4": "fp4_efficiency"}.get(
                precision, "gemm_efficiency"
            )
            curve = gemm_seconds(entry["m"], entry["n"], entry["k"], precision, machine.rates)
            ratios.setdefault(name, []).append(curve / entry["seconds"])
        for entry in document.get("attention") or []:
            curve = attention_seconds(
                entry["batch"],
                entry["sequence"],
                entry["sequence"],
                entry["heads"],
                entry.get("kv_heads", entry["heads"]),
                entry["head_dim"],
                machine.rates,
                backward=bool(entry.get("backward", False)),
            )
            ratios.setdefault("attention_efficiency", []).append(curve / entry["seconds"])
        for entry in document.get("collectives") or []:
            name, slowdown = _collective(entry, machine)
            ratios.setdefault(name, []).append(slowdown)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CalibrationError(f"{path}: a measurement is malformed: {type(error).__name__}: {error}") from None
    wrong = next((name for name, values in ratios.items() if not all(_is_positive(value) for value in values)), None)
    if wrong:
        raise CalibrationError(f"{path}: a measurement for {wrong} has seconds or sizes that are not positive")
    return {**{name: statistics.median(values) for name, values in ratios.items()}, **pins}


def _collective(entry: Mapping[str, Any], machine: MachineRates) -> tuple[str, float]:
    network, ranks = machine.network, int(entry["ranks"])
    group = Group(ranks, min(ranks, network.nvlink_domain), min(ranks, network.node_gpus))
    function = {
        "all_reduce": all_reduce_seconds,
        "all_gather": all_gather_seconds,
        "reduce_scatter": reduce_scatter_seconds,
    }[entry["operation"]]
    name = "nvlink_slowdown" if ranks <= network.nvlink_domain else "network_slowdown"
    return name, entry["seconds"] / function(entry["bytes"], group, network)


def _run_of_case(entry: dict[str, Any], where: str) -> LoggedRun:
    name = str(entry.get("id") or where)
    try:
        case = read_case(entry, name)
    except (CaseFileError, KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CalibrationError(f"{where}: {error}") from None
    return LoggedRun(name, case_terms(case), case_machine(case), case.measured_step_seconds)


def _run_of_job(entry: dict[str, Any], where: str, folder: Path, software: str) -> LoggedRun:
    unknown = [key for key in entry if key not in ("job", "step_seconds", "layout", "name")]
    if unknown:
        raise CalibrationError(f"{where}: key {unknown[0]!r} is not known; allowed: job, step_seconds, layout, name")
    logged = entry.get("step_seconds")
    steps = logged if isinstance(logged, list) else [logged]
    if not steps or not all(_is_positive(step) for step in steps):
        raise CalibrationError(f"{where}: step_seconds must be a positive number or a list of them, not {logged!r}")
    job = load_job(folder / str(entry["job"]))
    shape = job.model_shape
    if job.train is None or shape is None:
        raise CalibrationError(f"{where}: {job.name} does not train a model of known shape")
    if job.run.share_gpus:
        raise CalibrationError(f"{where}: the ranks of {job.name} share GPUs, so its steps do not show a GPU's speed")
    cluster = resolve_cluster(job.cluster, job.price)
    machine = machine_of(cluster)
    spec = _layout_spec(entry["layout"], where) if "layout" in entry else job.layout
    if spec is None:
        raise CalibrationError(f"{where}: {job.name} has layout auto; give the layout that the run used under 'layout'")
    try:
        layout = spec.resolve(cluster.num_gpus, job.precision)
    except LayoutError as error:
        raise CalibrationError(f"{where}: {error}") from None
    problems = check_layout(layout, shape, cluster.num_gpus, job.global_batch_sequences, job.sequence)
    if problems:
        raise CalibrationError(f"{where}: layout: {'; '.join(problems)}")
    model = StepModel(
        shape,
        job.sequence,
        job.global_batch_sequences,
        machine.rates,
        machine.network,
        find_profile(software, machine.gpu).traits,
        lora=bool(job.train.lora),
        imbalance=REAL_IMBALANCE if shape.is_moe else 1.0,
        host_link_bytes_per_second=machine.host_link_bytes_per_second,
        weights=job.train.weights,
        lora_rank=job.train.lora.rank if job.train.lora else 0,
        graphs=job.train.graphs != "off",
    )
    name = str(entry.get("name") or f"{job.name}: {layout}")
    return LoggedRun(name, model.terms(layout), machine, float(statistics.median(steps)))


def _unexplained_factor(gap: Array, explained: Array, rest: Array) -> float:
    """Return the factor on what no constant explains: the mean under the likelihood of all gaps and a wide prior."""
    weights = []
    for factor in FACTORS:
        covariance = explained + np.diag((factor * rest) ** 2)
        _, determinant = np.linalg.slogdet(covariance)
        prior = (math.log(factor / USUAL_FACTOR) / FACTOR_SPREAD) ** 2
        weights.append(-0.5 * (determinant + gap @ np.linalg.solve(covariance, gap) + prior))
    likelihood = np.exp(np.array(weights) - max(weights))
    return float(np.sqrt((likelihood * np.array(FACTORS) ** 2).sum() / likelihood.sum()))


def _layout_spec(stated: object, where: str) -> LayoutSpec:
    if not isinstance(stated, dict):
        raise CalibrationError(f'{where}: layout must be an object such as {{"fsdp": 16, "tp": 8}}, not {stated!r}')
    allowed = list(LayoutSpec.model_fields)
    for key in stated:
        if key not in allowed:
            hint = did_you_mean(str(key), allowed)
            raise CalibrationError(f"{where}: layout: {key!r} is not known{hint}; allowed: {', '.join(allowed)}")
    try:
        return LayoutSpec(**stated)
    except ValueError as error:
        first = str(error).splitlines()
        raise CalibrationError(f"{where}: layout: {' '.join(line.strip() for line in first[1:3])}") from None


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _log_steps(terms: StepTerms, theta: Array, count: int) -> tuple[Array, Array]:
    """Return log(step) of every run and its derivative by the log-constants and the scale."""
    value, jacobian = linearise(TRAINING_STEP, terms, np.tile(theta[:-1], (count, 1)))
    return value + theta[-1], np.hstack([jacobian, np.ones((count, 1))])


def _pin(mean: Array, covariance: Array, pins: Mapping[str, float]) -> tuple[Array, Array]:
    """Condition the prior on measured constants."""
    for name, value in pins.items():
        index = INDEX[name]
        column = covariance[:, index].copy()
        gain = column / (column[index] + PINNED_DEVIATION**2)
        mean = mean + gain * (math.log(value) - mean[index])
        covariance = covariance - np.outer(gain, column)
    return mean, covariance


def _identified(
    jacobian: Array, prior: Array, posterior: Array, pins: Mapping[str, float]
) -> tuple[list[str], list[str]]:
    """Return the constants that the runs identify, and those that matter but stay unidentified."""
    identified, unidentified = [], []
    for index, constant in enumerate(CONSTANTS):
        before, after = math.sqrt(prior[index, index]), math.sqrt(max(posterior[index, index], 0.0))
        if constant.name in pins:
            continue
        if after < IDENTIFIED * before:
            identified.append(constant.name)
        elif np.abs(jacobian[:, index]).max() * after > MATTERS:
            unidentified.append(constant.name)
    return identified, unidentified
