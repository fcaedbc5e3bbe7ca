"""What every HTTP server of ours checks before it reads a request: the host it names, the page that sent it, its key.

How long a connection may keep a server waiting is in `connections`, which needs uvicorn and is imported by name.
"""

from craton.http_guard.hosts import LOOPBACK_NAMES, host_name, is_foreign, is_loopback, repeated_header
from craton.http_guard.keys import MIN_TOKEN_CHARACTERS, AccessError, is_same_key, key_bytes, read_token

__all__ = [
    "LOOPBACK_NAMES",
    "MIN_TOKEN_CHARACTERS",
    "AccessError",
    "host_name",
    "is_foreign",
    "is_loopback",
    "is_same_key",
    "key_bytes",
    "read_token",
    "repeated_header",
]
