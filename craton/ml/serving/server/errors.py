"""What a client is told when it gets no answer, in OpenAI's form.

ServingError (ValueError)
└── ApiError               an HTTP status, a type, and a message that says what was given and what is allowed
    ├── BadRequestError    400  the request itself is wrong
    ├── KeyRefusedError    401  no key, or one that is not known
    ├── ForbiddenError     403  a page of another site sent it, or it names another host
    ├── NotFoundError      404  no such model
    ├── ConflictError      409  not in the state the engine is in
    ├── TooLargeError      413  more bytes than a body may have
    ├── BusyError          429  too many requests wait already
    ├── BrokenError        500  the engine lost this one request
    ├── UnavailableError   503  loading, draining, or the engine is gone
    └── TooSlowError       504  not done within --request-timeout
ClientGoneError            nobody is left to be told
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from craton.ml.serving.settings import ServingError


class ApiError(ServingError):
    """`parameter` names the field that is wrong, `code` is what programs tell errors apart by."""

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
        """The body as JSON in ASCII, since a message may quote half a surrogate pair."""
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
    """The client has closed its connection."""
