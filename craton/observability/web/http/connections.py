"""How the page is served: on connections that cost those who open them, and no token is needed to be refused one."""

from __future__ import annotations

from typing import Any

import uvicorn
from starlette.types import ASGIApp

from craton.http_guard import BoundedH11, ConnectionLimits

END_SECONDS = 1  # streams are open for as long as a page is; they are not waited for


class PageConnection(BoundedH11):
    """A browser opens six connections at most, but all who come through a proxy are one peer."""

    limits = ConnectionLimits(head_seconds=10.0, body_seconds=10.0, write_seconds=10.0, per_peer=128, total=512)


def server_config(app: ASGIApp, **options: Any) -> uvicorn.Config:
    """The page's server, for uvicorn."""
    return uvicorn.Config(
        app,
        http=PageConnection,
        ws="none",
        lifespan="on",
        access_log=False,
        timeout_graceful_shutdown=END_SECONDS,
        **{"log_level": "warning", **options},
    )
