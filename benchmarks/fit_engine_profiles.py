"""Fit the shipped engine profiles to the published measurements of servers and our own: `python
benchmarks/fit_engine_profiles.py` writes craton/planning/serving/engine_profiles.json. Takes twenty seconds; run it
after any change of the serving terms, the kernel or collective curves, the priors, or the two data files.
"""

from __future__ import annotations

import json
from pathlib import Path

from craton.planning.serving.engine_fitting import shipped_profiles
from craton.planning.serving.profile import engine_profile_json

OUTPUT = Path(__file__).parent.parent / "craton" / "planning" / "serving" / "engine_profiles.json"


def main() -> None:
    profiles = shipped_profiles()
    entries = ",\n".join(json.dumps(engine_profile_json(profile)) for profile in profiles)
    OUTPUT.write_text('{"profiles": [\n' + entries + "\n]}\n", encoding="utf-8")
    print(f"{OUTPUT.name}: {len(profiles)} profiles of {len({profile.engine for profile in profiles})} engines")


if __name__ == "__main__":
    main()
