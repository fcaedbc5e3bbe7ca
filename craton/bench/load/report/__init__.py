"""The report of a load test: terminal, HTML and plots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.bench.load.report.html import report_page
    from craton.bench.load.report.terminal import print_report
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
