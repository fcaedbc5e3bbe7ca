"""Print the errors of plans of our own server on one H200 (data/craton_servers.json): every second load held back, all
loads in sample, and p99 of TTFT under random arrivals. `python benchmarks/own_server_accuracy.py`, about a minute."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

from craton.planning.serving.engine_fitting import calibrate_engine, fit_serving, own_serving_cases, serving_corpus
from craton.planning.serving.engine_fitting.cases import ServingCase
from craton.planning.serving.engine_fitting.fit import served_row, served_seconds, stack_rows
from craton.planning.serving.engine_fitting.shipped import profile_of_fit
from craton.planning.serving.load import ServedLoad, ServedReplica, TokenLengths, open_load, saturation
from craton.planning.serving.profile import OWN_ENGINE, EngineProfile
from craton.planning.serving.step_times import ServedSteps

DATA = Path(__file__).parent.parent / "data" / "craton_servers.json"
METRICS = {"tpot_seconds": "TPOT", "ttft_seconds": "TTFT", "tokens_per_second_per_gpu": "tokens/s"}
RUNS = 5  # of a reader who calibrates


def main() -> None:
    cases = own_serving_cases()
    loads = list(dict.fromkeys(case.id for case in cases))
    print("| loads | n | " + " | ".join(f"{name}: median, maximum" for name in METRICS.values()) + " |")
    print("|---|--:|" + "--:|" * len(METRICS))
    for first in (0, 1):
        held = set(loads[first::2])
        fitted = profile_of([case for case in cases if case.id not in held])
        show(f"held back, half {first + 1}", fitted, [case for case in cases if case.id in held])
    shipped = profile_of(cases)
    show("in sample", shipped, cases)
    own = [case for case in cases if case.id.startswith("craton_8b_")]
    names = list(dict.fromkeys(case.id for case in own))[::2][:RUNS]
    calibrated = calibrate_engine(shipped, [case for case in own if case.id in names]).profile
    show(f"8B, not among {RUNS} runs of a calibration", calibrated, [case for case in own if case.id not in names])
    print("\n| requests/s | load | TTFT p99, measured | planned | ratio |\n|--:|--:|--:|--:|--:|")
    measured = {row["id"]: row["metrics"].get("p99_ttft_ms") for row in json.loads(DATA.read_text())["cases"]}
    for case in cases:
        if case.metric == "ttft_seconds" and case.load.kind == "open":
            share, planned = tail(shipped, case)
            seen = measured[case.id] / 1e3
            print(
                f"| {case.load.rate:g} | {share:.0%} | {seen * 1e3:.0f} ms | {planned * 1e3:.0f} ms "
                f"| {planned / seen:.2f} |"
            )


def profile_of(cases: Sequence[ServingCase]) -> EngineProfile:
    """Return the profile that would be shipped with these measurements of our own server."""
    fit, gpu = fit_serving((*serving_corpus(), *cases)), cases[0].machine.gpu
    profile = profile_of_fit(fit, OWN_ENGINE, "", gpu.name, gpu.generation, len(cases), "")
    return calibrate_engine(profile, cases).profile


def show(name: str, profile: EngineProfile, cases: Sequence[ServingCase]) -> None:
    errors: dict[str, list[float]] = {metric: [] for metric in METRICS}
    for case in cases:
        seconds = predicted_seconds(profile, case)
        value = seconds if case.metric.endswith("_seconds") else 1.0 / seconds
        errors[case.metric].append(abs(value / case.measured - 1.0))
    shown = [f"{median(found):.1%}, {max(found):.0%}" if found else "" for found in errors.values()]
    print(f"| {name} | {len(cases)} | " + " | ".join(shown) + " |")


def predicted_seconds(profile: EngineProfile, case: ServingCase) -> float:
    row = stack_rows([served_row(case)])
    seconds = served_seconds(row, [np.array([value]) for value in profile.constants])[0]
    return float(seconds) * math.exp(profile.log_scales[list(METRICS).index(case.metric)])


def tail(profile: EngineProfile, case: ServingCase) -> tuple[float, float]:
    """Return the load as a share of saturation, and p99 of TTFT."""
    load = ServedLoad(TokenLengths.fixed(case.load.prompt), TokenLengths.fixed(case.load.output), rate=case.load.rate)
    steps = ServedSteps(served_row(case).decode, profile.constants, profile.step_factor)
    outside = profile["first_token_seconds"] * float(steps.work.first_token_factor)
    replica = ServedReplica(steps, first_token_seconds=outside, prefill_slowdown=profile["prefill_slowdown"])
    found = open_load(replica, load, np.array([case.load.rate]))
    return case.load.rate / float(saturation(replica, load).rate), float(found.ttft["p99"][0])


if __name__ == "__main__":
    main()
