"""Fit the shipped software profiles to the published runs and our own: `python benchmarks/fit_profiles.py` writes
craton/planning/calibration/profiles.json. Takes about two seconds; run it after any change of the step model, the
kernel or collective curves, the priors, data/training_results.json or data/craton_runs.json.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from craton.infrastructure.catalog import gpu, gpus
from craton.planning.calibration import STACKS, UNKNOWN, corpus_fit, effect_labels, profile_from_fit
from craton.planning.calibration.profiles import profile_json
from craton.planning.calibration.published_rows import fitted_cases

OUTPUT = Path(__file__).parent.parent / "craton" / "planning" / "calibration" / "profiles.json"


def main() -> None:
    fit = corpus_fit()
    cases = fitted_cases()
    counts = Counter((case.family, case.machine.gpu) for case in cases)
    newest = {
        family: max((case.release for case in cases if case.family == family), default="")
        for family in {case.family for case in cases}
    }
    generations = sorted({card.generation for card in gpus()} | {"cpu"})
    entries = []
    for software, traits in STACKS.items():
        # Releases are compared as text, which orders versions such as 26.04 and 26.08; stacks whose rows differ by
        # variant and not by version have no newest one.
        release = newest.get(software, "")
        release = release if release[:1].isdigit() else ""
        measured = sorted(name for family, name in counts if family == software)
        for name, generation in [
            *((name, gpu(name).generation) for name in measured),
            *(("", generation) for generation in generations),
            ("", ""),
        ]:
            labels = effect_labels(family=software, release=release, gpu=name, generation=generation)
            rows = counts[(software, name)] if name else 0
            kind = "own" if software == UNKNOWN else "published"
            source = (
                f"fitted to {rows} {kind} runs of {software} on {name}"
                if rows
                else f"fitted to {kind} runs of {software} on other GPUs"
                if measured
                else "priors: no published run of this stack"
            )
            profile = profile_from_fit(fit, software, name, labels, traits, rows, source)
            entries.append({**profile_json(profile), "generation": generation})
    header = '{\n "corpus": "data/training_results.json",\n "rows": ' + str(len(cases)) + ',\n "profiles": [\n'
    OUTPUT.write_text(header + ",\n".join(json.dumps(entry) for entry in entries) + "\n]}\n", encoding="utf-8")
    print(f"{OUTPUT.name}: {len(entries)} profiles of {len(STACKS)} stacks from {len(cases)} runs")


if __name__ == "__main__":
    main()
