"""Errors of a load test that a user can cause and fix.

CratonError(ValueError)
└── LoadTestError
    ├── WorkloadError     a load, length, trace or objective is invalid
    └── EndpointError     the server cannot be used: unreachable, key or model rejected, no streaming
"""

from __future__ import annotations

from craton.errors import CratonError


class LoadTestError(CratonError):
    """A load test cannot be run."""


class WorkloadError(LoadTestError):
    """A load, length, trace or objective is invalid."""


class EndpointError(LoadTestError):
    """The server cannot be used: unreachable, key or model rejected, no streaming."""
