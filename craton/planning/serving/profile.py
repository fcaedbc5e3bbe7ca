"""Constants of a serving engine: how far its steps are from kernel benchmarks, and its fixed times.

Each constant has a prior, from kernel benchmarks and engine sources, and a spread: the standard deviation of its
logarithm between engines, versions and GPUs. Shipped profiles (engine_profiles.json) are fitted to published
measurements by name, version and GPU; where an engine was never measured on a GPU, or is unknown, its profile is wider.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from craton.errors import CratonError
from craton.infrastructure import Gpu
from craton.nearest import did_you_mean
from craton.planning.fitting import Prediction

METRICS = ("tpot_seconds", "ttft_seconds", "tokens_per_second_per_gpu")
OWN_ENGINE = "craton"
UNKNOWN_ENGINE = "unknown"
# Craton's engine on a CPU: `benchmarks/serving_cpu.py`, one thread of an AMD EPYC (Zen 5), fp32 and bf16, 2026-11-19.
CPU_CONSTANTS = {
    "weight_rate": 0.46,
    "matmul_rate": 0.63,
    "kv_rate": 0.077,
    "prefill_attention_rate": 1.0,
    "prefill_slowdown": 1.0,
    "prefill_layer_seconds": 1e-9,  # no GPU waits for launches
}
CPU_OPERATIONS = {"layer_seconds": 186.0, "step_seconds": 120.0, "request_seconds": 7.1}  # as many operations of torch
CPU_OPERATION_SECONDS = 2.5e-6  # of a CPU whose operations were not measured
CPU_DEVIATION = 0.4  # of log(measured / predicted), on other CPUs
FORMAT = 1


class EngineProfileError(CratonError):
    """An engine profile that does not exist or cannot be read."""


@dataclass(frozen=True)
class EngineConstant:
    name: str
    prior: float
    spread: float
    meaning: str


ENGINE_CONSTANTS: tuple[EngineConstant, ...] = (
    EngineConstant("matmul_rate", 0.75, 0.25, "large matmuls, of the best benchmark"),
    EngineConstant("weight_rate", 0.90, 0.15, "reading weights in decode, of a streaming kernel"),
    EngineConstant("kv_rate", 0.85, 0.25, "decode attention, of its best kernel"),
    EngineConstant("prefill_attention_rate", 0.75, 0.40, "prefill attention, of its best kernel"),
    EngineConstant("expert_rate", 0.60, 0.40, "grouped matmuls of experts, with uneven routing"),
    EngineConstant("expert_spread", 0.7, 0.30, "share of tokens whose experts are independent of the others'"),
    EngineConstant("kernel_slowdown", 1.0, 0.40, "fixed time of small matmuls, attention and expert kernels"),
    EngineConstant("layer_seconds", 1.0e-5, 0.60, "norms, rotary embedding, casts and gaps of a layer"),
    EngineConstant("step_seconds", 1.0e-3, 0.80, "scheduling, sampling and copies of a step"),
    EngineConstant("request_seconds", 3.0e-6, 0.80, "scheduling, sampling and streaming of a request in a step"),
    EngineConstant("collective_slowdown", 1.3, 0.40, "collectives, of their best kernels"),
    EngineConstant("prefill_slowdown", 1.1, 0.35, "prefill inside a step with decode, of prefill alone"),
    EngineConstant("prefill_layer_seconds", 2.5e-4, 0.60, "launching the kernels of a layer in a step with prefill"),
    EngineConstant(
        "first_token_seconds", 1.0e-2, 0.80, "HTTP, tokenizer, scheduling and launches of a request, up to 40 layers"
    ),
    EngineConstant("balance_steps", 10.0, 0.80, "steps that a prefill waits for other attention-data-parallel ranks"),
    EngineConstant("burst", 1.0, 0.60, "share of the start burst in a mean TTFT, of requests in the first wave"),
    EngineConstant("kv_share", 0.85, 0.20, "share of the KV cache that requests fill"),
)
ENGINE_NAMES = tuple(constant.name for constant in ENGINE_CONSTANTS)
ENGINE_SPREAD = tuple(constant.spread for constant in ENGINE_CONSTANTS)
# Craton's engine replays decode steps as CUDA graphs: Qwen3-0.6B decodes a token in 0.8 ms. A step with a prompt is
# launched kernel by kernel, in 20 to 35 ms.
OWN_PRIORS = {
    "kernel_slowdown": 0.4,
    "layer_seconds": 2.0e-6,
    "step_seconds": 1.0e-4,
    "request_seconds": 1.0e-5,
    "prefill_slowdown": 1.0,
    "prefill_layer_seconds": 7.0e-4,
    "first_token_seconds": 4.0e-3,
    "kv_share": 1.0,
}


def engine_prior_log(engine: str) -> tuple[float, ...]:
    """Return the logarithms of the priors, in the order of ENGINE_NAMES."""
    own = OWN_PRIORS if engine == OWN_ENGINE else {}
    return tuple(math.log(own.get(constant.name, constant.prior)) for constant in ENGINE_CONSTANTS)


@dataclass(frozen=True)
class EngineProfile:
    """The constants of one engine on one kind of GPU, with their uncertainty."""

    engine: str
    version: str  # "": of all versions
    gpu: str  # "": any of the generation
    generation: str  # "": any
    log_constants: tuple[float, ...]  # in the order of ENGINE_NAMES
    covariance: tuple[tuple[float, ...], ...]
    log_scales: tuple[float, ...]  # residual of each metric, in the order of METRICS
    deviations: tuple[float, ...]  # of log(metric) that no constant explains
    rows: int  # measurements of this engine, version and GPU
    source: str

    @property
    def name(self) -> str:
        return f"{self.engine} {self.version}".strip()

    @property
    def constants(self) -> tuple[float, ...]:
        return tuple(math.exp(value) for value in self.log_constants)

    @property
    def step_factor(self) -> float:
        """What the constants leave unexplained of the times of steps."""
        return math.exp(self.log_scales[METRICS.index("tpot_seconds")])

    def __getitem__(self, name: str) -> float:
        return math.exp(self.log_constants[ENGINE_NAMES.index(name)])

    def predict(self, metric: str, seconds: Callable[[Any], Any]) -> Prediction:
        """Return median and spread of a metric. `seconds` gets the constants as columns [constants, columns] and
        returns the metric, or the seconds of a GPU per output token, of every column."""
        step = 1e-4  # of the forward differences
        count = len(self.log_constants)
        columns = np.exp(np.array(self.log_constants)[:, None] + step * np.eye(count, count + 1, 1))
        value = np.log(np.broadcast_to(seconds(columns), (count + 1,)))
        slope = (value[1:] - value[0]) / step
        index = METRICS.index(metric)
        variance = float(slope @ np.array(self.covariance) @ slope) + self.deviations[index] ** 2
        return Prediction(math.exp(float(value[0]) + self.log_scales[index]), math.sqrt(variance))


def engine_names() -> list[str]:
    return sorted({profile.engine for profile in _shipped()})


def find_engine_profile(software: str, gpu: Gpu) -> EngineProfile:
    """Return the profile of `vllm`, of `vllm 0.19.0`, or of a profile file, on a GPU: the nearest that was measured."""
    if _is_file(software):
        return load_engine_profile(software)
    engine, version = named_engine(software)
    profiles = [profile for profile in _shipped() if profile.engine == engine]
    if gpu.generation == "cpu":
        return _cpu_profile(engine, gpu)
    generation = gpu.generation.removesuffix("-ultra")
    wanted = [(version, gpu.name, generation)] if version else []
    wanted += [("", gpu.name, generation), ("", "", generation), ("", "", "")]
    for key in wanted:
        found = next((p for p in profiles if (p.version, p.gpu, p.generation) == key), None)
        if found:
            return found
    raise AssertionError(f"engine_profiles.json has no entry for {engine} without a GPU")


def named_engine(software: str) -> tuple[str, str]:
    """Return the engine and version that `vllm`, `vllm 0.19.0` or a profile file names."""
    if _is_file(software):
        profile = load_engine_profile(software)
        return profile.engine, profile.version
    engine, _, version = software.strip().partition(" ")
    if engine not in engine_names():
        hint = did_you_mean(engine, engine_names())
        raise EngineProfileError(
            f"engine {engine!r} has no profile{hint}; allowed: {', '.join(engine_names())}, or a file"
        )
    return engine, version


def unmeasured_version(software: str, gpu: Gpu) -> str:
    """Return what a plan says of a version or a profile file that was not measured on this GPU; empty where it was."""
    if _is_file(software):
        profile = load_engine_profile(software)
        if profile.gpu in ("", gpu.name):
            return ""
        return (
            f"{Path(software).name} was fitted to measurements on {profile.gpu}; its interval is not that of {gpu.name}"
        )
    engine, version = named_engine(software)
    entries = [profile for profile in _shipped() if profile.engine == engine and profile.version]
    here = sorted({profile.version for profile in entries if profile.gpu == gpu.name and profile.version[0].isdigit()})
    if (
        not version
        or version in here
        or any(profile.version == version and profile.gpu == gpu.name for profile in entries)
    ):
        return ""
    measured = f"measured are {', '.join(here)}" if here else "no version was"
    return f"{engine} {version} was not measured on {gpu.name}, so the plan is that of {engine}; {measured}"


def _is_file(software: str) -> bool:
    return Path(software).suffix == ".json" or "/" in software


def _cpu_profile(engine: str, cpu: Gpu) -> EngineProfile:
    """Return the profile of Craton's engine on a CPU: Python and small operations take most of a step."""
    if engine != OWN_ENGINE:
        raise EngineProfileError(f"engine {engine!r} was measured on GPUs only; plan it for an instance with GPUs")
    operation = cpu.operation_seconds or CPU_OPERATION_SECONDS
    constants = {
        **{constant.name: constant.prior for constant in ENGINE_CONSTANTS},
        **CPU_CONSTANTS,
        **{name: count * operation for name, count in CPU_OPERATIONS.items()},
    }
    count = len(ENGINE_NAMES)
    return EngineProfile(
        engine=OWN_ENGINE,
        version="",
        gpu=cpu.name,
        generation="cpu",
        log_constants=tuple(math.log(constants[name]) for name in ENGINE_NAMES),
        covariance=((0.0,) * count,) * count,
        log_scales=(0.0,) * len(METRICS),
        deviations=(CPU_DEVIATION,) * len(METRICS),
        rows=0,
        source="measured on one CPU, with the rates of this one",
    )


def engine_profile_json(profile: EngineProfile) -> dict[str, Any]:
    """Return a profile as readable JSON: constants by name, the covariance as its lower triangle."""
    return {
        "format": FORMAT,
        "engine": profile.engine,
        "version": profile.version,
        "gpu": profile.gpu,
        "generation": profile.generation,
        "rows": profile.rows,
        "source": profile.source,
        "constants": {
            name: _short(math.exp(log)) for name, log in zip(ENGINE_NAMES, profile.log_constants, strict=True)
        },
        "log_scales": {name: _short(value) for name, value in zip(METRICS, profile.log_scales, strict=True)},
        "deviations": {name: _short(value) for name, value in zip(METRICS, profile.deviations, strict=True)},
        "covariance": [[_short(x) for x in line[: i + 1]] for i, line in enumerate(profile.covariance)],
    }


def engine_profile_from_json(entry: dict[str, Any]) -> EngineProfile:
    """Return a profile from its JSON; ValueError if it is of another version."""
    constants, triangle = entry["constants"], entry["covariance"]
    if set(constants) != set(ENGINE_NAMES):
        raise ValueError("constants do not match this version; run `craton calibrate` again")
    size = len(ENGINE_NAMES)
    matrix = tuple(tuple(float(triangle[max(i, j)][min(i, j)]) for j in range(size)) for i in range(size))
    profile = EngineProfile(
        engine=str(entry["engine"]),
        version=str(entry["version"]),
        gpu=str(entry["gpu"]),
        generation=str(entry["generation"]),
        log_constants=tuple(math.log(constants[name]) for name in ENGINE_NAMES),
        covariance=matrix,
        log_scales=tuple(float(entry["log_scales"][name]) for name in METRICS),
        deviations=tuple(float(entry["deviations"][name]) for name in METRICS),
        rows=int(entry["rows"]),
        source=str(entry["source"]),
    )
    numbers = (*profile.log_constants, *profile.log_scales, *profile.deviations, *(x for line in matrix for x in line))
    if not all(math.isfinite(number) for number in numbers):
        raise ValueError("a constant, a scale or the covariance is not a finite number")
    return profile


def save_engine_profile(profile: EngineProfile, path: str | Path) -> None:
    Path(path).write_text(json.dumps(engine_profile_json(profile), indent=1) + "\n", encoding="utf-8")


def load_engine_profile(path: str | Path) -> EngineProfile:
    """Load a profile that `craton calibrate` wrote."""
    try:
        entry = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(entry, dict) or entry.get("format") != FORMAT or "engine" not in entry:
            raise ValueError("write one with `craton calibrate`")
        return engine_profile_from_json(entry)
    except OSError as error:
        raise EngineProfileError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise EngineProfileError(f"{path}: not an engine profile: {error}") from None


@lru_cache(maxsize=1)
def _shipped() -> tuple[EngineProfile, ...]:
    text = resources.files(__package__).joinpath("engine_profiles.json").read_text(encoding="utf-8")
    return tuple(engine_profile_from_json(entry) for entry in json.loads(text)["profiles"])


def _short(value: float) -> float:
    return float(f"{value:.4g}")
