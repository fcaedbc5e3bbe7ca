"""What every request passes before it is understood: its API key, how large it may be, whether one is taken now.

/health, /ping and /metrics need no key, since those who watch a server have none. A server that is asked for far more
than it can do must be able to say no for next to nothing, or saying no is all it does.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Collection

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from craton.ml.serving.server.errors import ApiError, BusyError, KeyRefusedError, TooLargeError

FREE_PATHS = ("/health", "/ping", "/metrics")
GENERATION_PATHS = ("/v1/chat/completions", "/v1/completions")


class Gate:
    """In front of the app. `check_taken` raises why no answer is begun now."""

    def __init__(
        self, app: ASGIApp, api_keys: Collection[str], max_body_bytes: int, check_taken: Callable[[], None]
    ) -> None:
        self._app = app
        self._check_taken = check_taken
        self._digests = [_digest(key.encode()) for key in api_keys]
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            if scope["path"] not in FREE_PATHS:
                self._check_key(headers.get(b"authorization", b""))
            length = headers.get(b"content-length", b"0")
            if length.isdigit() and int(length) > self._max_body_bytes:
                raise self._too_large()
            if scope["path"] in GENERATION_PATHS and scope["method"] == "POST":
                self._check_taken()
        except BusyError as error:  # whoever comes again may use the same connection
            while (await receive()).get("more_body"):
                pass
            await _send_error(send, error, is_last=False)
            return
        except ApiError as error:
            await _send_error(send, error)
            return
        await self._app(scope, self._counted(receive), send)

    def _check_key(self, given: bytes) -> None:
        if not self._digests:
            return
        scheme, _, key = given.partition(b" ")
        # Digests of equal length, all of them compared: how long it takes says nothing about any key.
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != b"bearer" or not any(matches):
            raise KeyRefusedError(
                "the API key is missing or not known; send it as `Authorization: Bearer KEY`", code="invalid_api_key"
            )

    def _counted(self, receive: Receive) -> Receive:
        """A body may come without saying its length."""
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_body_bytes:
                error = self._too_large()
                raise HTTPException(error.status, error.message)  # FastAPI lets no other kind through
            return message

        return counted

    def _too_large(self) -> TooLargeError:
        return TooLargeError(f"the body is larger than {self._max_body_bytes:,} bytes", code="body_too_large")


async def _send_error(send: Send, error: ApiError, is_last: bool = True) -> None:
    body = error.encoded()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers()}
    if is_last:
        headers["connection"] = "close"
    encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
