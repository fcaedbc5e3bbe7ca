"""What people look at while runs run: the page (`craton ui`) and the terminal view (`craton top`).

Both read run directories, and Prometheus where there is one; neither needs a database.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import loader

if TYPE_CHECKING:
    from craton.observability.web.access import Access
    from craton.observability.web.application import make_app
    from craton.observability.web.queries import prometheus_address
    from craton.observability.web.serve import can_open, serve_page
    from craton.observability.web.terminal import TopView, frame, frame_json, show_top
else:
    __getattr__ = loader(
        __name__,
        {
            "access": ("Access",),
            "application": ("make_app",),
            "queries": ("prometheus_address",),
            "serve": ("can_open", "serve_page"),
            "terminal": ("TopView", "frame", "frame_json", "show_top"),
        },
    )

__all__ = [
    "Access",
    "TopView",
    "can_open",
    "frame",
    "frame_json",
    "make_app",
    "prometheus_address",
    "serve_page",
    "show_top",
]
