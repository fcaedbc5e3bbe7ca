"""How well more samples are predicted: published tables with several numbers of samples (data/repeated_sampling.json).

    python benchmarks/plan_strategies.py [fitting | held_back] [--known 2]

Of each table the first numbers of samples are given (--known: how many), with votes also the smallest vote; all others
are predicted. Prints the median error in points, the share inside the 80% interval, and the mean width of the interval.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median

from craton.planning.strategies import AccuracyCurve, KnownAccuracy, PredictedAccuracy

DATA = Path(__file__).parents[1] / "data" / "repeated_sampling.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("half", nargs="?", choices=("fitting", "held_back"), default="held_back")
    parser.add_argument("--known", type=int, default=2)
    arguments = parser.parse_args()
    found = predictions(arguments.half, arguments.known)
    print(f"{'source':<20}{'what':<24}{'points':>7}{'error':>8}{'inside':>8}{'width':>8}")
    for (source, what), pairs in found.items():
        errors = [abs(predicted.accuracy - share) for predicted, share in pairs]
        inside = [predicted.low <= share <= predicted.high for predicted, share in pairs]
        width = fmean(predicted.high - predicted.low for predicted, _ in pairs)
        numbers = f"{len(pairs):>7}{100 * median(errors):>8.2f}{fmean(inside):>8.0%}{100 * width:>8.1f}"
        print(f"{source:<20}{what:<24}{numbers}")


def predictions(half: str, num_known: int) -> dict[tuple[str, str], list[tuple[PredictedAccuracy, float]]]:
    """Return (source, what) → predicted and published shares."""
    document = json.loads(DATA.read_text(encoding="utf-8"))
    found: dict[tuple[str, str], list[tuple[PredictedAccuracy, float]]] = defaultdict(list)
    for row in document["rows"]:
        source = document["sources"][row["source"]]
        if source["half"] != half:
            continue
        passes, votes = (_sizes(row.get(key, {})) for key in ("pass_at", "majority_at"))
        problems, samples = row.get("problems", source.get("problems")), source["samples"]
        known = dict(list(passes.items())[:num_known])
        curve = AccuracyCurve(KnownAccuracy(problems, known, {}, samples))
        for size, share in list(passes.items())[num_known:]:
            found[row["source"], "pass@k"].append((curve.best_of(size, samples), share))
        for size, share in votes.items():
            found[row["source"], "vote, none known"].append((curve.vote(size, samples), share))
        if len(votes) > 1:
            first = min(votes)
            curve = AccuracyCurve(KnownAccuracy(problems, known, {first: votes.pop(first)}, samples))
            for size, share in votes.items():
                found[row["source"], "vote, smallest known"].append((curve.vote(size, samples), share))
    return found


def _sizes(shares: dict[str, float]) -> dict[int, float]:
    return dict(sorted((int(size), share) for size, share in shares.items()))


if __name__ == "__main__":
    main()
