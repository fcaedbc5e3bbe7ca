"""Errors that clients get, in OpenAI's format.

ServingError (ValueError)
└── ApiError               an HTTP status, a type, and a message that says what was given and what is allowed
    ├── BadRequestError    400  the request itself is wrong
    ├── KeyRefusedError    401  no key, or an unknown one
    ├── ForbiddenError     403  a cross-site request, or the Host header names another host
    ├── NotFoundError      404  unknown model
    ├── ConflictError      409  not allowed in the engine's present state
    ├── TooLargeError      413  the body is too large
    ├── BusyError          429  too many requests are waiting
    ├── BrokenError        500  the engine failed this one request
    ├── UnavailableError   503  loading, draining, or the engine failed
    └── TooSlowError       504  not done within --request-timeout
ClientGoneError            the client disconnected; no response is sent
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from craton.ml.serving.settings import ServingError


class ApiError(ServingError):
    """`parameter` names the invalid field; `code` identifies the error for programs."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"

    def __init__(
        self, message: str, parameter: str | None = None, code: str | None = None, retry_seconds: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.parameter = parameter
        self.code = code
        self.retry_seconds = retry_seconds

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.parameter, "code": self.code}
        return {"error": error}

    def encoded(self) -> bytes:
        """Return the body as ASCII JSON, since a message may quote half a surrogate pair."""
        return json.dumps(self.body()).encode()

    def headers(self) -> dict[str, str]:
        return {} if self.retry_seconds is None else {"Retry-After": str(self.retry_seconds)}


class BadRequestError(ApiError):
    status = 400
    kind = "invalid_request_error"


class KeyRefusedError(ApiError):
    status = 401
    kind = "invalid_request_error"

    def headers(self) -> dict[str, str]:
        return {"WWW-Authenticate": "Bearer"}


class ForbiddenError(ApiError):
    status = 403
    kind = "invalid_request_error"


class NotFoundError(ApiError):
    status = 404
    kind = "invalid_request_error"


class ConflictError(ApiError):
    status = 409
    kind = "invalid_request_error"


class TooLargeError(ApiError):
    status = 413
    kind = "invalid_request_error"


class BusyError(ApiError):
    status = 429
    kind = "rate_limit_error"


class BrokenError(ApiError):
    status = 500


class UnavailableError(ApiError):
    status = 503


class TooSlowError(ApiError):
    status = 504
    kind = "timeout_error"


class ClientGoneError(Exception):
    """The client closed its connection."""
