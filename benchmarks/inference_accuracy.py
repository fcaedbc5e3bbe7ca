"""Accuracy of predictions of served models on published measurements: `python benchmarks/inference_accuracy.py` prints
the tables of docs/measurements.md, leave one group out (ten minutes on one core) and leave one engine out (one), and
the errors on our own server. `--holdout none` prints the errors in sample; `--read FILE` the tables of what `craton
bench plan data/inference_results.json --json` printed, at once; `--page docs/measurements.md` also renews the tables
there."""

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
WORDS = {
    "tokens_per_second_per_gpu": "tokens/s per GPU",
    "tpot_seconds": "TPOT",
    "ttft_seconds": "TTFT",
    ", moe": ", MoE",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--holdout", action="append", choices=("group", "engine", "none"))
    parser.add_argument("--read", action="append", metavar="FILE", type=Path)
    parser.add_argument("--page", metavar="FILE", type=Path)
    options = parser.parse_args()
    for summary in summaries(options.holdout, options.read):
        skipped = summary["skipped share of consistent rows"]
        print(f"\nholdout {summary['holdout']}: {summary['rows']} rows, ", end="")
        print(f"{summary['contradictory']} contradict themselves, {skipped:.1%} of the others skipped")
        for view, lines in tables(summary).items():
            print(f"\n| {view} | {' | '.join(COLUMNS)} |\n|---|{'--:|' * len(COLUMNS)}")
            print("\n".join(lines.values()))
        if options.page:
            renew(options.page, summary)
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


def tables(summary: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return the lines of each table by their names."""
    searched = {f"{name}, layout searched": entry for name, entry in summary["open layout"].items()}
    found: dict[str, dict[str, str]] = {}
    for view, entries in {**summary["stated layout"], "layout searched": searched}.items():
        lines = found.setdefault(view, {})
        for long_name, entry in entries.items():
            name = long_name
            for word, short in WORDS.items():
                name = name.replace(word, short)
            shares = f"{100 * entry['median']:.1f} % | {100 * entry['p90']:.1f} % | {100 * entry['bias']:+.1f} %"
            lines[name] = f"| {name} | {entry['n']} | {shares} | {100 * entry['inside']:.0f} % | {entry['width']:.2f} |"
    return found


def renew(page: Path, summary: dict[str, Any]) -> None:
    """Replace the lines of the page's table of this holdout that have the same names."""
    known = {name: line for lines in tables(summary).values() for name, line in lines.items()}
    start = f"| leave one {summary['holdout']} out |"
    lines, inside = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        inside = line.startswith(start) or (inside and line.startswith("|"))
        lines.append(known.get(line.split("|")[1].strip(), line) if inside else line)
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
