"""What a process reports about its own end: an exception, or the last words of its log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.telemetry.error_reports.exceptions import report_exception
    from craton.telemetry.error_reports.log_text import read_error
    from craton.telemetry.error_reports.report import ErrorReport
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
