"""Guard of every route: connection limits, access checks, and the security headers of every response."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from craton.http_guard import BoundedH11, ConnectionLimits, repeated_header
from craton.observability.web.http.access import SESSION_SECONDS, Access
from craton.observability.web.http.static_files import address_of_file
from craton.observability.web.rendering import render

MAX_BODY_BYTES = 4096
END_SECONDS = 1  # streams stay open as long as their page: shutdown does not wait for them
SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class PageConnection(BoundedH11):
    """A browser opens at most six connections, but all clients behind a proxy are one peer."""

    limits = ConnectionLimits(head_seconds=10.0, body_seconds=10.0, write_seconds=10.0, per_peer=128, total=512)


def server_config(app: ASGIApp, **options: Any) -> uvicorn.Config:
    """Return uvicorn's configuration for the page."""
    return uvicorn.Config(
        app,
        http=PageConnection,
        ws="none",
        lifespan="on",
        access_log=False,
        timeout_graceful_shutdown=END_SECONDS,
        **{"log_level": "warning", **options},
    )


@dataclass
class RequestGuard:
    """Check every request before its route, and add the security headers to every response."""

    app: ASGIApp
    access: Access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        refusal = self._refusal(request)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(SECURITY_HEADERS)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        await (refusal or self.app)(scope, receive, guarded)

    def _refusal(self, request: Request) -> Response | None:
        # The path that is routed by; `request.url` contains the Host header, which the client controls.
        access, path = self.access, request.scope["path"]
        if reason := repeated_header(request.headers.raw):
            return refuse(400, reason)
        headers, cookies = dict(request.headers), request.cookies
        if not access.knows_host(headers.get("host", "")):
            return refuse(
                403, "unknown name in the Host header: use localhost, or start it with --listen or --public-url"
            )
        if request.method not in ("GET", "HEAD", "POST"):
            return refuse(405, "only GET and POST are allowed")
        if path == "/login" or path.startswith("/static/"):
            return None
        if not access.may_look(headers, cookies):
            wants_page = "text/html" in headers.get("accept", "")
            return _login_page(request, access, 401) if wants_page else refuse(401, "viewing needs the token")
        if request.method == "POST":
            reason = access.why_not_change(headers, cookies)
            return refuse(403, reason) if reason else None
        return None


def refuse(status: int, reason: str) -> Response:
    return JSONResponse({"error": reason}, status_code=status)


def about_request(request: Request, access: Access) -> dict[str, Any]:
    """Return the context that every template needs."""
    is_known = access.is_known(dict(request.headers), request.cookies)
    return {"may_change": is_known, "static": address_of_file}


async def login(request: Request, access: Access) -> Response:
    """Exchange the token for a cookie and a secret. Pages send it as JSON, which forms of other websites cannot."""
    if request.method != "POST":
        return _login_page(request, access, 200)
    headers = dict(request.headers)
    if headers.get("content-type", "").partition(";")[0] != "application/json" or not access.is_same_origin(headers):
        return refuse(403, "a login must be sent by a page of this server")
    body = b""
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                return refuse(413, "the request body is too long for a token")
    except ClientDisconnect:
        return refuse(400, "the request body is not a complete token")
    try:
        token = json.loads(body)["token"]
    except (ValueError, KeyError, TypeError, RecursionError):
        token = None
    if not isinstance(token, str) or not access.is_token(token):
        return refuse(403, "that is not the token that `craton ui` printed")
    secret = secrets.token_urlsafe(32)
    answer = JSONResponse({"secret": secret})
    answer.set_cookie(
        access.cookie_name,
        access.new_session(secret),
        max_age=SESSION_SECONDS,
        httponly=True,
        samesite="strict",
        secure=bool(access.public),
        path="/",
    )
    return answer


def _login_page(request: Request, access: Access, status: int) -> Response:
    return HTMLResponse(render("login.html", **about_request(request, access)), status_code=status)
