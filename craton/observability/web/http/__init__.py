"""The web application: routes, access, static files, connections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.observability.web.http.serve import can_open, serve_page
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
