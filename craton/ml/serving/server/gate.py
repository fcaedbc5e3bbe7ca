"""What every request passes before it is understood: who may send it, how large it may be, whether one is taken now.

A server that is asked for far more than it can do must be able to say no for next to nothing, or saying no is all it
does. So a body is bounded by its bytes and by its values: a JSON parser takes far longer for a megabyte of numbers than
for a megabyte of text, and no other client is answered meanwhile.
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
GENERATION_PATHS = ("/v1/chat/completions", "/v1/completions")


@dataclass(frozen=True)
class BodyLimits:
    """Values are counted as commas, before anything is parsed; those of texts count too."""

    max_bytes: int
    max_values: int


class Gate:
    """In front of the app. `check_taken` raises why no answer is begun now, `limits` says how large a body may be."""

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
            # A client that is still sending when the connection closes gets no answer. Whoever comes again to a busy
            # server may use the same connection.
            is_whole = await _discard(receive)
            await _send_error(send, error, is_last=not is_whole)
            return
        except ApiError as error:
            await _send_error(send, error)
            return
        await self._app(scope, _counted(receive, limits), send)


async def _discard(receive: Receive) -> bool:
    """Reads a body and keeps nothing of it; whether it ended within reason."""
    num_bytes = 0
    while num_bytes < MAX_DISCARDED_BYTES:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if not message.get("more_body"):
            return True
    return False


def _counted(receive: Receive, limits: BodyLimits) -> Receive:
    """A body may come without saying its length."""
    num_bytes = num_values = 0

    async def counted() -> Message:
        nonlocal num_bytes, num_values
        message = await receive()
        body = message.get("body", b"")
        num_bytes += len(body)
        num_values += body.count(b",")
        if num_bytes > limits.max_bytes or num_values > limits.max_values:
            error = _too_large(limits)
            raise HTTPException(error.status, error.message)  # FastAPI lets no other kind through
        return message

    return counted


def _too_large(limits: BodyLimits) -> TooLargeError:
    return TooLargeError(
        f"the body is larger than {limits.max_bytes:,} bytes, or has more than {limits.max_values:,} values; send less "
        "in one request",
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
