"""Load tests of servers that speak OpenAI's protocol: what is asked, how fast, and what the answers took."""

from craton.loadtest.benchmark import Level, Report, LoadSettings, LoadWorkload, bench_serve
from craton.loadtest.endpoint import LoadTarget
from craton.loadtest.errors import EndpointError, LoadTestError, WorkloadError
from craton.loadtest.lengths import Lengths, parse_lengths
from craton.loadtest.load import Closed, Limit, Open, Sweep, Timed, parse_sweep
from craton.loadtest.objectives import Objectives, parse_objectives
from craton.loadtest.report import print_report
from craton.loadtest.report_html import report_page
from craton.loadtest.requests import Prefixes, Request
from craton.loadtest.samples import RequestSample
from craton.loadtest.saturation import Saturation
from craton.loadtest.summary import Distribution, Failure, Summary, summarize, timeline
from craton.loadtest.trace import load_trace

__all__ = [
    "Closed",
    "Distribution",
    "EndpointError",
    "Failure",
    "Lengths",
    "Level",
    "Limit",
    "LoadTestError",
    "Objectives",
    "Open",
    "Prefixes",
    "Report",
    "Request",
    "RequestSample",
    "Saturation",
    "LoadSettings",
    "Summary",
    "Sweep",
    "LoadTarget",
    "Timed",
    "LoadWorkload",
    "WorkloadError",
    "bench_serve",
    "load_trace",
    "parse_lengths",
    "parse_objectives",
    "parse_sweep",
    "print_report",
    "report_page",
    "summarize",
    "timeline",
]
