"""Checks of all Craton HTTP servers before they read a request: host, origin, key.

Limits for slow connections are in `connections`, which needs uvicorn and is imported by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.http_guard.connections import BoundedH11, BoundedHttpTools, ConnectionLimits
    from craton.http_guard.hosts import host_name, is_foreign, is_loopback, repeated_header
    from craton.http_guard.keys import MIN_TOKEN_CHARACTERS, AccessError, is_same_key, key_bytes, read_token
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
