"""`python -m craton.agent RUN --node K`: one node's agent, through all generations of a run.

Exit codes: 0 done or stopped, 1 failed, 2 bad input (nothing was started).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence

from craton.agent.errors import LaunchError
from craton.agent.launch import Launch, read_launch
from craton.agent.lock import NodeLock
from craton.agent.membership import HELD_STOP_OPTION
from craton.agent.supervisor import Supervisor
from craton.formatting import counted
from craton.limits import raise_file_limit
from craton.log_levels import configure_logging
from craton.telemetry import RunDirectory
from craton.telemetry.files import protect_output


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m craton.agent", description="Supervise one node of a run.")
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument("--node", metavar="K", type=int, required=True, help="index of this node in launch.json")
    parser.add_argument(
        HELD_STOP_OPTION, action="store_true", help="join a stopping run whose last state is only in memory"
    )
    options = parser.parse_args(arguments)
    configure_logging(is_strict=False)
    run = RunDirectory(options.run)
    if not run.looks_like_a_run():
        return _refuse(f"{run.path} is not a run directory; `craton run` creates one")
    try:
        launch = read_launch(run)
    except LaunchError as error:
        with contextlib.suppress(OSError):
            run.mark("FATAL", str(error))
        return _refuse(str(error))
    if not 0 <= options.node < len(launch.nodes):
        return _refuse(
            f"--node {options.node}: {run.launch_path} has {counted(len(launch.nodes), 'node')}, counted from 0"
        )
    node = launch.nodes[options.node]
    lock = NodeLock(run, node)
    if not lock.acquire():
        return _refuse(f"another agent of {node} is already running in {run.path}")
    if run.has("FATAL"):
        return _refuse(f"{run.path} has failed (see its FATAL file); continue it with `craton resume {run.name}`")
    if run.has("DONE") or (run.has("STOP") and not options.held_stop):
        print(f"craton agent: nothing to start: {run.name} is {'done' if run.has('DONE') else 'stopped'}")
        return 0
    if complaint := raise_file_limit(_needed_files(launch)):
        with contextlib.suppress(OSError):
            run.mark("FATAL", f"the agent of {node} cannot start: {complaint}")
        return _refuse(complaint)
    try:
        supervisor = Supervisor(run, launch, options.node, lock, options.held_stop)
    except LaunchError as error:
        with contextlib.suppress(OSError):
            run.mark("FATAL", str(error))
        return _refuse(str(error))
    return supervisor.supervise()


def _needed_files(launch: Launch) -> int:
    """Files the agent opens: its own, pipes and pages of its ranks, two connections per other agent."""
    return 64 + 8 * launch.ranks_per_node + 2 * len(launch.nodes)


def _refuse(text: str) -> int:
    print(f"craton agent: {text}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    protect_output()
    sys.exit(main())
