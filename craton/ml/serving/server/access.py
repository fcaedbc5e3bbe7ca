"""Access control of requests, by path and headers alone.

- On loopback the Host header must name this machine (against DNS rebinding). On other addresses clients need a key.
- Cross-site requests from browsers are refused if they change something. Programs (curl, SDKs) send no Origin.
- API keys give access to the API, the admin key to the admin endpoints; neither gives access to the other.
- `/health`, `/ping`, `/live` and `/metrics` need no key: probes and Prometheus have none, and they return only counts.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from craton.errors import CratonError
from craton.http_guard import MIN_TOKEN_CHARACTERS, host_name, is_foreign, is_loopback, key_bytes, read_token
from craton.ml.serving.server.errors import ForbiddenError, KeyRefusedError

KEYS_VARIABLE = "CRATON_API_KEYS"  # one per line, or separated by commas
ADMIN_VARIABLE = "CRATON_ADMIN_KEY"
FREE_PATHS = ("/health", "/ping", "/live", "/metrics")
READING_METHODS = ("GET", "HEAD", "OPTIONS")


class KeyRing:
    """A set of keys; only digests of equal length are kept and compared."""

    def __init__(self, keys: Collection[str]) -> None:
        self._digests = [hashlib.sha256(key_bytes(key)).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def opens(self, authorization: str) -> bool:
        """Whether a header `Bearer KEY` has one of the keys. All are compared, in constant time."""
        scheme, _, key = authorization.partition(" ")
        digest = hashlib.sha256(key.strip().encode("latin-1", errors="replace")).digest()
        matches = [hmac.compare_digest(digest, known_digest) for known_digest in self._digests]
        return scheme.lower() == "bearer" and any(matches)


@dataclass(frozen=True)
class ServerAccess:
    """The access rules of a server that listens on `host`. Without an admin key there are no admin endpoints."""

    host: str = "127.0.0.1"
    api_keys: tuple[str, ...] = ()
    admin_key: str | None = None

    def __post_init__(self) -> None:
        if not self.api_keys and not is_loopback(self.host):
            raise CratonError(
                f"{self.host} can be reached from other machines, so clients need an API key; export one and name its "
                "variable in serve.api_keys (--api-keys VARIABLE), or listen on 127.0.0.1"
            )
        if self.admin_key is not None and self.admin_key in self.api_keys:
            raise CratonError("the admin key is also an API key; use a separate key for the admin endpoints")


class AccessCheck:
    """Applies the rules. `admin_paths` need the admin key."""

    def __init__(self, access: ServerAccess, admin_paths: Collection[str] = ()) -> None:
        self._is_local = is_loopback(access.host)
        self._api_keys = KeyRing(access.api_keys)
        self._admin_keys = KeyRing([] if access.admin_key is None else [access.admin_key])
        self._admin_paths = frozenset(admin_paths)

    def check(self, method: str, path: str, headers: Mapping[str, str]) -> None:
        """Raise if the request is refused. Header names are lower-case."""
        name = host_name(headers.get("host", ""))
        if self._is_local and (name is None or not is_loopback(name)):
            raise ForbiddenError(
                "this server listens on loopback and the Host header names another machine; use localhost, or have a "
                "proxy set Host to localhost",
                code="unknown_host",
            )
        if method not in READING_METHODS and is_foreign(headers):
            raise ForbiddenError(
                "cross-site requests from browsers are refused (Origin, Sec-Fetch-Site); send the request from a "
                "program, or have the proxy that serves the page forward its Host header",
                code="foreign_origin",
            )
        if path in FREE_PATHS:
            return
        authorization = headers.get("authorization", "")
        if path in self._admin_paths:
            if not self._admin_keys.opens(authorization):
                raise KeyRefusedError(
                    "admin endpoints need the admin key; API keys are not accepted; send the key in RUN/admin.key (or "
                    "in the variable that serve.admin_key names) as `Authorization: Bearer KEY`",
                    code="invalid_admin_key",
                )
        elif self._api_keys and not self._api_keys.opens(authorization):
            raise KeyRefusedError(
                "the API key is missing or unknown; send it as `Authorization: Bearer KEY`", code="invalid_api_key"
            )


def read_api_keys(file: Path | None, variable: str | None) -> tuple[str, ...]:
    """Read the API keys. An empty file or variable is an error: it would open the server to everyone."""
    if file is None:
        keys = _split(os.environ.get(KEYS_VARIABLE, ""))
        if variable is not None and not keys:
            raise CratonError(
                f"serve.api_keys names {variable}, which has no key; set it to one key, or several separated by commas"
            )
        return keys
    keys = _split(file.read_text(encoding="utf-8"))
    if not keys:
        raise CratonError(f"{file} has no API key; write one per line, or omit --api-key-file")
    return keys


def read_admin_key(file: Path | None, variable: str | None) -> str:
    """Read the admin key from its variable, else from a file that only its owner may read; create a missing file."""
    admin_key = os.environ.get(ADMIN_VARIABLE, "").strip()
    if variable is None and not admin_key:
        if file is None:
            raise CratonError(f"--admin needs a key: give --admin-key-file, or set ${ADMIN_VARIABLE}")
        return read_token(file)
    if len(admin_key) < MIN_TOKEN_CHARACTERS:
        raise CratonError(
            f"the admin key in {variable or ADMIN_VARIABLE} has {len(admin_key)} characters; the minimum is "
            f"{MIN_TOKEN_CHARACTERS}; make one with `openssl rand -hex 24`"
        )
    return admin_key


def _split(text: str) -> tuple[str, ...]:
    return tuple(key for line in text.splitlines() for key in (part.strip() for part in line.split(",")) if key)
