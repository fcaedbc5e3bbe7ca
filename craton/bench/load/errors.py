"""Errors of a load test that a user can cause and mend.

CratonError(ValueError)
└── LoadTestError
    ├── WorkloadError     a load, a length, a trace or an objective cannot be understood
    └── EndpointError     the server cannot be driven: none there, key or model refused, no streaming
"""

from __future__ import annotations

from craton.errors import CratonError


class LoadTestError(CratonError):
    """A load test cannot be run."""


class WorkloadError(LoadTestError):
    """A load, a length, a trace or an objective cannot be understood."""


class EndpointError(LoadTestError):
    """The server cannot be driven: none there, key or model refused, no streaming."""
