"""Runs that a run owns: which ones a job has, the manager that starts, watches and stops them, the result of a sweep.

The manager is a process, `python -m craton.orchestration.members RUN`. `decide` is its whole logic, a pure function of
what it sees; other modules look and act.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.orchestration.members.decision import MemberView, OwnerView, decide
    from craton.orchestration.members.result import (
        SWEEP_FILE,
        SWEEP_PAGE,
        SweepResult,
        SweepRow,
        best_row,
        read_sweep,
        sweep_json,
        sweep_rows,
    )
    from craton.orchestration.members.sweep_report import (
        sweep_plot_html,
        sweep_table,
        sweep_table_text,
        sweep_verdict,
        write_sweep,
    )
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
