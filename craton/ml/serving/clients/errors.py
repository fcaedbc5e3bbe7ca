"""Errors of inference clients. Each message names the endpoint.

CratonError(ValueError)
└── InferenceError
    ├── RequestRefusedError       the endpoint refuses this request, and would again
    ├── MissingCapabilityError    the endpoint cannot give what is asked for; nothing was started
    ├── EndpointUnavailableError  no connection, overloaded, or failed; another endpoint or a later try may succeed
    ├── ServerFailedError         the endpoint failed this request (HTTP 5xx but 503); it is not sent again
    ├── BrokenStreamError         the answer broke off, and this endpoint cannot continue it
    ├── ProtocolError             what the endpoint sends is not OpenAI's format
    ├── AnswerTimeoutError        the answer did not come within its timeouts
    └── ClientClosedError         the client was closed
"""

from __future__ import annotations

from craton.errors import CratonError


class InferenceError(CratonError):
    """An answer, or the rest of it, cannot be had."""


class RequestRefusedError(InferenceError):
    """The endpoint refuses this request, and would again."""


class MissingCapabilityError(InferenceError):
    """The endpoint cannot give what is asked for; nothing was started."""


class EndpointUnavailableError(InferenceError):
    """No connection, overloaded, or failed. `retry_seconds`: when to try again, if the endpoint says so."""

    def __init__(self, message: str, retry_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class ServerFailedError(InferenceError):
    """The endpoint failed this request; it is not sent again, for it may be the cause."""


class BrokenStreamError(InferenceError):
    """The answer broke off, and this endpoint cannot continue it; the answer keeps what had come."""


class ProtocolError(InferenceError):
    """What the endpoint sends is not OpenAI's format."""


class AnswerTimeoutError(InferenceError):
    """The answer did not come within its timeouts."""


class ClientClosedError(InferenceError):
    """The client was closed."""
