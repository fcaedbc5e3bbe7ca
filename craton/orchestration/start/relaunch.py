"""Read a run's last launch, or rebuild it if launch.json is damaged, empty or missing.

A resume plans the run again from job.yaml. From the last launch it needs only what no plan has: the generation number,
the folder of the user's own functions, the copy's number in an array, and the remaining faults. The generations,
heartbeats and events of the run contain all of that too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from craton.agent import Launch, LaunchError, LaunchSchemaError, newest_generation, next_number, read_launch
from craton.job import Job
from craton.orchestration.draft import JOB_FOLDER, chaos_of, rank_command
from craton.telemetry import RunDirectory
from craton.telemetry.files import read_lines
from craton.telemetry.node import read_heartbeat


def last_launch(run: RunDirectory, job: Job) -> tuple[Launch, str]:
    """Return the last launch, and a note if it was rebuilt."""
    try:
        return read_launch(run), ""
    except LaunchSchemaError:
        raise
    except LaunchError:
        launch, note = rebuilt_launch(run, job)
        return launch, f"{run.launch_path} was damaged or missing: rebuilt from job.yaml, generations and events{note}"


def rebuilt_launch(run: RunDirectory, job: Job) -> tuple[Launch, str]:
    """Rebuild the last launch from the run's other files; return it and a note on what is unknown."""
    newest = newest_generation(run)
    launch = Launch(
        generation=last_generation(run),
        nodes=newest.nodes if newest else [f"node-{number}" for number in range(job.cluster.num_nodes)],
        ranks_per_node=newest.ranks_per_node if newest else 1,
        command=rank_command(job, run.path),
        env=_environment(run),
        num_nodes=len(newest.nodes) if newest else 0,
    )
    chaos = chaos_of(job, launch)
    is_known = JOB_FOLDER in launch.env
    note = "" if is_known else "; the folder of the job file is unknown, the current folder is used"
    return Launch(**{**vars(launch), "chaos": chaos}), note


def last_generation(run: RunDirectory) -> int:
    """Return the highest generation number in any file of the run, or 0."""
    beats = [read_heartbeat(run, path.name) for path in (run.path / "heartbeat").glob("[!.]*")]
    messages = [line.get("generation") for line in _events(run)]
    numbers = [number for number in messages if isinstance(number, int) and not isinstance(number, bool)]
    return max([next_number(run) - 1, *(beat.generation for beat in beats if beat), *numbers, 0])


def _environment(run: RunDirectory) -> dict[str, str]:
    """Return the ranks' environment as recorded by the agents of the newest launch."""
    started = [line for line in _events(run) if line.get("event") == "agent_started"]
    newest = max(started, key=lambda line: float(line.get("time") or 0.0), default={})
    recorded = newest.get("environment")
    return {str(name): str(value) for name, value in recorded.items()} if isinstance(recorded, dict) else {}


def _events(run: RunDirectory) -> Iterator[dict[str, Any]]:
    for path in sorted((run.path / "events").glob("*.jsonl")):
        yield from read_lines(path)[0]
