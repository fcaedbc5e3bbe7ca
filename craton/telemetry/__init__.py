"""The run directory and what is recorded in it; recording never blocks or raises; torch-free.

In a rank:      `Recorder.from_environment()`, `LedgerClock()`
In any verb:    `find_run(name)`, `list_runs()`, `summarize(run)`, `read_lines(path, offset)`
In the agent:   `LineWriter`, `MetricsEndpoint`, `Heartbeat`

Modules that a rank does not need (the metric table, summaries, the endpoint) load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.telemetry.errors import RunError, RunExistsError, RunNotFoundError
    from craton.telemetry.event_text import event_fields
    from craton.telemetry.metric_table import read_table
    from craton.telemetry.results import result_details, result_scores, result_words
    from craton.telemetry.rundirectory import (
        MARKERS,
        Marker,
        RunDirectory,
        find_run,
        list_runs,
        name_by_path,
        read_json,
        reporting_node,
        reporting_rank,
        runs_root,
    )
    from craton.telemetry.summary import RUN_STATES, RunState, RunSummary, Summarizer, summarize
    from craton.telemetry.vocabulary import (
        METRICS,
        PHASES,
        ROLLOUT_PHASES,
        TWINS,
        plan_checkpoint_intervals,
        plan_twins,
        split_label,
        step_phases,
        with_label,
    )
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
