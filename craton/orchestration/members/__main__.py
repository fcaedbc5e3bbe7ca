"""`python -m craton.orchestration.members RUN`: the manager of the runs that RUN owns.

`--starter` is its helper, which starts members; `--report` is the rank of a run that only reports on its members. Exit
codes: 0 done, 1 failed, 2 bad input, 3 no member has succeeded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from craton.log_levels import configure_logging
from craton.telemetry import RunDirectory
from craton.telemetry.files import protect_output


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m craton.orchestration.members", description="Manage member runs.")
    parser.add_argument("run", metavar="RUN", help="directory of the run that owns them")
    parser.add_argument("--starter", action="store_true", help="start the members whose names are on standard input")
    parser.add_argument("--report", action="store_true", help="report on the members until all have ended")
    options = parser.parse_args(arguments)
    configure_logging(is_strict=False)
    run = RunDirectory(options.run)
    if not run.looks_like_a_run():
        print(f"craton members: {run.path} is not a run directory", file=sys.stderr)
        return 2
    if options.starter:
        from craton.orchestration.members.starter import start_members

        start_members(run)
        return 0
    if options.report:
        from craton.orchestration.members.report import report

        return report(run)
    return _manage(run)


def _manage(run: RunDirectory) -> int:
    from craton.orchestration.members.manager import Manager, managing

    with managing(run) as is_alone:
        if not is_alone:
            print("another member manager of this run is alive", flush=True)
            return 0
        Manager(run).manage()
    return 0


if __name__ == "__main__":
    protect_output()
    sys.exit(main())
