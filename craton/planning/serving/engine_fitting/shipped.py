"""Engine profiles from the fit: one for each engine, version and GPU that was measured, and wider ones beside them."""

from __future__ import annotations

import math
from collections import Counter

from craton.infrastructure.catalog import gpu as catalog_gpu
from craton.infrastructure.catalog import gpus
from craton.planning.fitting import TAIL_WIDTH, Fit
from craton.planning.serving.engine_fitting.calibrate import calibrate_engine
from craton.planning.serving.engine_fitting.cases import own_serving_cases
from craton.planning.serving.engine_fitting.fit import (
    DRAFT_EFFECTS,
    SERVING_NOISE,
    SERVING_SCALES,
    TTFT_EFFECTS,
    ServedRow,
    engine_label,
    fitted_serving_cases,
    serving_corpus_fit,
    version_label,
)
from craton.planning.serving.profile import METRICS, OWN_ENGINE, UNKNOWN_ENGINE, EngineProfile, engine_prior_log

OWN_SETUP = {"tpot_seconds": 0.05, "ttft_seconds": 0.15, "tokens_per_second_per_gpu": 0.05}  # a reader's own machines


def shipped_profiles() -> list[EngineProfile]:
    """Return the profiles of engine_profiles.json."""
    fit, cases = serving_corpus_fit(), fitted_serving_cases()
    by_gpu = Counter((case.engine, case.gpu) for case in cases)
    by_version = Counter((case.engine, case.version, case.gpu) for case in cases if case.version)
    generations = sorted({card.generation.removesuffix("-ultra") for card in gpus()})
    profiles = []
    for engine in (*sorted({case.engine for case in cases}), UNKNOWN_ENGINE):
        keys = [(version, name) for known, version, name in sorted(by_version) if known == engine]
        keys += [("", name) for known, name in sorted(by_gpu) if known == engine]
        for version, name in keys:
            rows = by_version[(engine, version, name)] if version else by_gpu[(engine, name)]
            generation = catalog_gpu(name).generation.removesuffix("-ultra")
            source = f"fitted to {rows} measurements of {engine} {version}".strip() + f" on {name}"
            profile = profile_of_fit(fit, engine, version, name, generation, rows, source)
            if engine == OWN_ENGINE:
                profile = calibrate_engine(profile, own_serving_cases(), source).profile
            profiles.append(profile)
        where = "other GPUs" if engine != UNKNOWN_ENGINE else "other engines"
        source = f"fitted to measurements of {where}"
        profiles += [profile_of_fit(fit, engine, "", "", generation, 0, source) for generation in (*generations, "")]
    return profiles


def profile_of_fit(
    fit: Fit[ServedRow], engine: str, version: str, gpu: str, generation: str, rows: int, source: str
) -> EngineProfile:
    """Return the profile of one engine from a fit; an empty GPU, generation or version is any."""
    name = engine if engine != UNKNOWN_ENGINE else ""
    labels = {
        "all": "all",
        "generation": generation,
        "engine": engine_label(name, version),
        "version": version_label(name, version),
        "engine-gpu": f"{engine_label(name, version)} {gpu}" if name and gpu else "",
    }
    scales, deviations = [], []
    for metric in METRICS:
        marked = {**labels, "engine-metric": f"{name} {metric}" if name else ""}
        mean, covariance = fit.posterior(marked, engine_prior_log(engine), ["engine-metric"])
        absent = {"engine-metric", *DRAFT_EFFECTS, *(TTFT_EFFECTS if metric != "ttft_seconds" else ())}
        scale_widths = SERVING_SCALES if engine != OWN_ENGINE else {}
        unshared = sum(width**2 for effect, width in scale_widths.items() if effect not in absent)
        noise = (TAIL_WIDTH * SERVING_NOISE[metric]) ** 2
        scales.append(float(mean[-1]))
        deviations.append(math.sqrt(max(float(covariance[-1, -1]), 0.0) + unshared + noise + OWN_SETUP[metric] ** 2))
    return EngineProfile(
        engine=engine,
        version=version,
        gpu=gpu,
        generation=generation,
        log_constants=tuple(float(x) for x in mean[:-1]),
        covariance=tuple(tuple(float(x) for x in line[:-1]) for line in covariance[:-1]),
        log_scales=tuple(scales),
        deviations=tuple(deviations),
        rows=rows,
        source=source,
    )
