"""`python -m craton.telemetry.track RUN tensorboard|wandb|mlflow`: send the metrics of a run to a tracker.

Sends the records of rank 0 and of the agent; those of other ranks stay in the run directory. Continues where the last
process for the same run and tracker ended. Exits when no agent is left or on SIGTERM, after sending what is there by
then. An agent ends it by closing its standard input, which also works while the process is still starting. A failing
tracker does not affect the run: this is a separate process, and the files it reads stay.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from craton.telemetry.errors import SinkError
from craton.telemetry.files import names_in, paths_in, read_lines
from craton.telemetry.node import read_heartbeat
from craton.telemetry.rundirectory import RunDirectory, read_json
from craton.telemetry.sinks import SINKS, Sink, State
from craton.telemetry.vocabulary import plan_twins

POLL_SECONDS = 2.0
CHUNK_BYTES = 1 << 20
_STAMP = ("time", "step", "generation", "node", "rank")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m craton.telemetry.track")
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument("sink", metavar="SINK", help=" | ".join(SINKS))
    parser.add_argument(
        "--until-stdin-closes", action="store_true", help="ignore SIGTERM and run until standard input closes"
    )
    options = parser.parse_args(arguments)
    ended = threading.Event()
    # A scheduler signals every process of a run, including this one, while ranks still record.
    signal.signal(signal.SIGTERM, signal.SIG_IGN if options.until_stdin_closes else lambda number, frame: ended.set())
    try:
        follow(RunDirectory(options.run), options.sink, _wait_for_stdin if options.until_stdin_closes else ended.wait)
    except SinkError as error:
        print(f"craton track: {error}", file=sys.stderr)
        return 2
    return 0


def follow(run: RunDirectory, sink_name: str, wait: Callable[[float], bool]) -> None:
    """Send lines until `wait(seconds)` returns True, or no agent is left."""
    if sink_name not in SINKS:
        raise SinkError(f"no tracker named {sink_name!r}; allowed: {', '.join(SINKS)}")
    state_path = run.path / "track" / f"{sink_name}.json"
    state_path.parent.mkdir(exist_ok=True)
    state = read_json(state_path)
    plan = {f"plan_{name}": value for name, value in plan_twins(read_json(run.plan_path)).items()}
    sink = SINKS[sink_name](run, plan, state)
    try:
        _write_json(state_path, state)
        is_last = False
        while not is_last:
            is_last = wait(POLL_SECONDS) or _has_no_agents_left(run)
            if _send_new(run, sink, state):
                sink.flush()
                _write_json(state_path, state)
    finally:
        sink.close()


def _send_new(run: RunDirectory, sink: Sink, state: State) -> bool:
    """Send new lines; False if there were none."""
    offsets: dict[str, int] = state.setdefault("offsets", {})
    before = dict(offsets)
    for path in paths_in(run.path / "metrics", "*.jsonl"):
        while True:
            offset = offsets.get(path.name, 0)
            lines, offsets[path.name] = read_lines(path, offset, CHUNK_BYTES)
            for line in lines:
                if line.get("rank") in (0, None):
                    values = {name: _number(value) for name, value in line.items() if name not in _STAMP}
                    known_values = {name: value for name, value in values.items() if value is not None}
                    if known_values:
                        sink.log(int(line.get("step") or 0), float(line.get("time") or 0.0), known_values)
            if offsets[path.name] == offset:
                break
    return offsets != before


def _wait_for_stdin(seconds: float) -> bool:
    return bool(select.select([sys.stdin], [], [], seconds)[0])


def _has_no_agents_left(run: RunDirectory) -> bool:
    """Whether the run had agents and none is left."""
    with contextlib.suppress(FileNotFoundError):
        nodes = names_in(run.path / "heartbeat", "[!.]*")
        beats = [beat for beat in (read_heartbeat(run, node) for node in nodes) if beat is not None]
        return bool(beats) and not any(beat.state == "running" and not beat.is_lost() for beat in beats)
    return True


def _number(value: Any) -> float | None:
    if value is None:
        return math.nan
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _write_json(path: Path, document: dict[str, Any]) -> None:
    fresh = path.with_suffix(".partial")
    fresh.write_text(json.dumps(document) + "\n", encoding="utf-8")
    os.replace(fresh, path)


if __name__ == "__main__":
    sys.exit(main())
