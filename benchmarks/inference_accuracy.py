"""Accuracy of predictions of served models on published measurements: `python benchmarks/inference_accuracy.py` prints
the tables of docs/measurements.md, leave one group out and leave one engine out (ten minutes each on one core), and the
errors on our own server. `--holdout none` prints the errors in sample; `--read FILE` the tables of what `craton bench
plan data/inference_results.json --json` printed, at once."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from craton.bench import bench_inference, inference_summary
from craton.planning.serving.engine_fitting import calibrate_engine, own_serving_cases, serving_corpus_path
from craton.planning.serving.profile import find_engine_profile

COLUMNS = ("n", "median", "p90", "bias", "inside", "width")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--holdout", action="append", choices=("group", "engine", "none"))
    parser.add_argument("--read", action="append", metavar="FILE", type=Path)
    options = parser.parse_args()
    for summary in summaries(options.holdout, options.read):
        skipped = summary["skipped share of consistent rows"]
        print(f"\nholdout {summary['holdout']}: {summary['rows']} rows, ", end="")
        print(f"{summary['contradictory']} contradict themselves, {skipped:.1%} of the others skipped")
        for view, entries in {**summary["stated layout"], "layout searched": summary["open layout"]}.items():
            print(f"\n| {view} | {' | '.join(COLUMNS)} |\n|---|{'--:|' * len(COLUMNS)}")
            for name, entry in entries.items():
                shares = " | ".join(f"{100 * entry[key]:.1f} %" for key in ("median", "p90", "bias"))
                print(f"| {name} | {entry['n']} | {shares} | {100 * entry['inside']:.0f} % | {entry['width']:.2f} |")
        choices = summary["decisions"]
        print(f"\nright choices: {choices['right']} of {choices['groups']} groups with three or more layouts")
        for choice in choices["cases"]:
            print(f"  {choice['loss']:+.1%} {choice['engine']} {choice['gpu']} {choice['model']} {choice['metric']}")
    own = own_serving_cases()
    result = calibrate_engine(find_engine_profile("unknown", own[0].machine.gpu), own)
    print("\n| our own server | measured | from other engines | calibrated |\n|---|--:|--:|--:|")
    for case, before, after in zip(result.cases, result.before, result.after, strict=True):
        errors = " | ".join(f"{value / case.measured - 1:+.1%}" for value in (before, after))
        print(f"| {case.id} | {case.measured:,.5g} | {errors} |")


def summaries(holdouts: list[Any] | None, files: list[Path] | None) -> Iterator[dict[str, Any]]:
    for file in files or []:
        yield json.loads(file.read_text(encoding="utf-8"))["summary"]
    for holdout in holdouts or ([] if files else ["group", "engine"]):
        yield inference_summary(bench_inference(serving_corpus_path(), holdout))


if __name__ == "__main__":
    main()
