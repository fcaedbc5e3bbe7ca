"""The run directory, what is recorded in it, and how to read it; low in the house, without torch.

In a rank:      `Recorder.from_environment()`, `LedgerClock()`
In any verb:    `find_run(name)`, `list_runs()`, `summarize(run)`, `read_lines(path, offset)`
In the agent:   `LineWriter`, `MetricsEndpoint`, `Heartbeat`

What a rank does not need (the metric table, summaries, the endpoint) is loaded when first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from craton.telemetry.errors import RunError, RunExistsError, RunNotFoundError, SinkError
from craton.telemetry.heartbeat import (
    LOST_SECONDS,
    Heartbeat,
    NodeState,
    process_start,
    read_heartbeat,
    touch_heartbeat,
    write_heartbeat,
)
from craton.telemetry.ledger import LedgerClock, LedgerReader
from craton.telemetry.lines import LineWriter, parse_line, read_lines, tail_lines
from craton.telemetry.page import BESIDE, LEDGER_KINDS, RankPage, TrapError, going_on, monotonic_of, own_page
from craton.telemetry.recorder import Recorder
from craton.telemetry.regular_files import (
    UnsafeFileError,
    append_regular,
    first_link,
    names_in,
    noting_unread,
    open_regular,
    paths_in,
    read_regular,
    read_regular_text,
)
from craton.telemetry.rundirectory import MARKERS, Marker, RunDirectory, find_run, list_runs, read_json, runs_root
from craton.telemetry.steadyclock import JUMP_SECONDS, STEADY, monotonic_clock_id, wall_offset
from craton.telemetry.storage import STORAGE_ERRORS, SafeOutput, protect_output, replace_text, storage_problem

if TYPE_CHECKING:
    from craton.telemetry.endpoint import MetricsEndpoint
    from craton.telemetry.log_times import LogClock, LogTimes
    from craton.telemetry.status import NodeStatus, RankStatus, read_status, write_status
    from craton.telemetry.summary import RUN_STATES, RunState, RunSummary, Summarizer, summarize
    from craton.telemetry.vocabulary import METRICS, TWINS, Metric, plan_checkpoint_intervals, plan_twins

__all__ = [
    "BESIDE",
    "JUMP_SECONDS",
    "LEDGER_KINDS",
    "LOST_SECONDS",
    "MARKERS",
    "METRICS",
    "RUN_STATES",
    "STEADY",
    "STORAGE_ERRORS",
    "TWINS",
    "Heartbeat",
    "LedgerClock",
    "LedgerReader",
    "LineWriter",
    "LogClock",
    "LogTimes",
    "Marker",
    "Metric",
    "MetricsEndpoint",
    "NodeState",
    "NodeStatus",
    "RankPage",
    "RankStatus",
    "Recorder",
    "RunDirectory",
    "RunError",
    "RunExistsError",
    "RunNotFoundError",
    "RunState",
    "RunSummary",
    "SafeOutput",
    "SinkError",
    "Summarizer",
    "TrapError",
    "UnsafeFileError",
    "append_regular",
    "find_run",
    "first_link",
    "going_on",
    "list_runs",
    "monotonic_clock_id",
    "monotonic_of",
    "names_in",
    "noting_unread",
    "open_regular",
    "own_page",
    "parse_line",
    "paths_in",
    "plan_checkpoint_intervals",
    "plan_twins",
    "process_start",
    "protect_output",
    "read_heartbeat",
    "read_json",
    "read_lines",
    "read_regular",
    "read_regular_text",
    "read_status",
    "replace_text",
    "runs_root",
    "storage_problem",
    "summarize",
    "tail_lines",
    "touch_heartbeat",
    "wall_offset",
    "write_heartbeat",
    "write_status",
]

_LATER = {
    "LogClock": "log_times",
    "LogTimes": "log_times",
    "METRICS": "vocabulary",
    "Metric": "vocabulary",
    "MetricsEndpoint": "endpoint",
    "NodeStatus": "status",
    "RUN_STATES": "summary",
    "RankStatus": "status",
    "RunState": "summary",
    "RunSummary": "summary",
    "Summarizer": "summary",
    "TWINS": "vocabulary",
    "plan_checkpoint_intervals": "vocabulary",
    "plan_twins": "vocabulary",
    "read_status": "status",
    "summarize": "summary",
    "write_status": "status",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'craton.telemetry' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"craton.telemetry.{_LATER[name]}"), name)
