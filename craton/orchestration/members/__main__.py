"""`python -m craton.orchestration.members RUN`: the manager of the runs that RUN owns.

`--start NAME` starts one member and exits; `--report` is the rank of a run that only reports on its members. Exit
codes: 0 done, 1 failed, 2 refused; the reason of a refused start is the standard output.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from craton.errors import CratonError
from craton.log_levels import configure_logging
from craton.telemetry import RunDirectory
from craton.telemetry.files import protect_output


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m craton.orchestration.members", description="Manage member runs.")
    parser.add_argument("run", metavar="RUN", help="directory of the run that owns them")
    parser.add_argument("--start", metavar="NAME", help="start or resume one member")
    parser.add_argument("--report", action="store_true", help="report on the members until all have ended")
    options = parser.parse_args(arguments)
    configure_logging(is_strict=False)
    run = RunDirectory(options.run)
    if not run.looks_like_a_run():
        print(f"craton members: {run.path} is not a run directory", file=sys.stderr)
        return 2
    if options.start:
        return _start(run, options.start)
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


def _start(run: RunDirectory, name: str) -> int:
    from craton.orchestration.members.starter import start_member

    try:
        start_member(run, name)
    except CratonError as error:
        print(" ".join(str(error).split("\n")), flush=True)
        return 2
    return 0


if __name__ == "__main__":
    protect_output()
    sys.exit(main())
