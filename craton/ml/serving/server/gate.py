"""Checks before a request is parsed: access, body size, and whether requests are accepted now.

An overloaded server must refuse requests cheaply. So a body has limits on bytes and on values: a JSON parser takes far
longer for a megabyte of numbers than for a megabyte of text, and blocks all other clients meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from craton.http_guard import repeated_header
from craton.ml.serving.server.access import AccessCheck
from craton.ml.serving.server.errors import ApiError, BadRequestError, BusyError, TooLargeError

MAX_DISCARDED_BYTES = 64 << 20
GENERATION_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/fork")


@dataclass(frozen=True)
class BodyLimits:
    """Values are counted as commas, before parsing; commas in texts count too."""

    max_bytes: int
    max_values: int


class Gate:
    """ASGI middleware. `check_taken` raises if no request is accepted now; `limits` returns the body limits."""

    def __init__(
        self, app: ASGIApp, access: AccessCheck, limits: Callable[[], BodyLimits], check_taken: Callable[[], None]
    ) -> None:
        self._app = app
        self._access = access
        self._limits = limits
        self._check_taken = check_taken

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        limits = self._limits()
        try:
            if reason := repeated_header(scope["headers"]):
                raise BadRequestError(reason, code="repeated_header")
            self._access.check(scope["method"], scope["path"], headers)
            length = headers.get("content-length", "0")
            if length.isdigit() and int(length) > limits.max_bytes:
                raise _too_large(limits)
            if scope["path"] in GENERATION_PATHS and scope["method"] == "POST":
                self._check_taken()
        except (BusyError, TooLargeError) as error:
            # A client that is still sending when the connection closes gets no response, so read the whole body. Its
            # retry can use the same connection.
            is_whole = await _discard(receive)
            await _send_error(send, error, is_last=not is_whole)
            return
        except ApiError as error:
            await _send_error(send, error)
            return
        await self._app(scope, _counted(receive, limits), send)


async def _discard(receive: Receive) -> bool:
    """Read and discard a body; return whether it ended within MAX_DISCARDED_BYTES."""
    num_bytes = 0
    while num_bytes < MAX_DISCARDED_BYTES:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if not message.get("more_body"):
            return True
    return False


def _counted(receive: Receive, limits: BodyLimits) -> Receive:
    """Enforce the limits on a body without a Content-Length, too."""
    num_bytes = num_values = 0

    async def counted() -> Message:
        nonlocal num_bytes, num_values
        message = await receive()
        body = message.get("body", b"")
        num_bytes += len(body)
        num_values += body.count(b",")
        if num_bytes > limits.max_bytes or num_values > limits.max_values:
            error = _too_large(limits)
            raise HTTPException(error.status, error.message)  # the only exception that FastAPI passes on here
        return message

    return counted


def _too_large(limits: BodyLimits) -> TooLargeError:
    return TooLargeError(
        f"the body has more than {limits.max_bytes:,} bytes or {limits.max_values:,} values; split the request",
        code="body_too_large",
    )


async def _send_error(send: Send, error: ApiError, is_last: bool = True) -> None:
    body = error.encoded()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers()}
    if is_last:
        headers["connection"] = "close"
    encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
