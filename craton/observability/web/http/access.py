"""Access control of the page: who may view it and who may change a run, based only on request headers.

- On loopback everyone on this machine may view it; beyond loopback, and behind a proxy, viewing needs the token too.
- A change (stop, resume, heal) always needs the token, by POST: as `Authorization: Bearer TOKEN`, or as the cookie and
  secret of a login, and then only from a page of this server.
- Browsers send a cookie to every port of a host, where other programs may listen. So the cookie only allows viewing.
  It contains a keyed hash of the secret; the page keeps the secret itself in its origin's storage.
- On loopback the Host header must name this machine or the proxy's public address: a website whose name points at
  127.0.0.1 (DNS rebinding) sends its own name there.

The cookie is signed with the token and contains its expiry, so the server keeps no sessions and a restart with the same
token file keeps all logins.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from craton.http_guard import AccessError, host_name, is_foreign, is_loopback, is_same_key, key_bytes

SESSION_SECONDS = 7 * 86400
SECRET_HEADER = "x-craton-secret"


@dataclass(frozen=True)
class Access:
    """The rules of one server. `port` is part of the cookie's name: browsers send cookies to every port of a host.
    `public` is the origin (`https://HOST`) of a proxy in front of it; empty without one."""

    token: str
    listens_beyond_loopback: bool
    port: int
    public: str = ""

    @property
    def cookie_name(self) -> str:
        return f"craton-{self.port}"

    def knows_host(self, host: str) -> bool:
        """Return whether the Host header names this server."""
        name = host_name(host)
        if name is None:
            return False
        return self.listens_beyond_loopback or is_loopback(name) or name == urlsplit(self.public).hostname

    def is_same_origin(self, headers: Mapping[str, str]) -> bool:
        """Return whether the browser's headers show that a page of this server sent the request; False without them."""
        origin = headers.get("origin", "")
        if self.public and origin == self.public:  # a proxy may rewrite Host
            return headers.get("sec-fetch-site", "same-origin") == "same-origin"
        return bool(origin) and not is_foreign(headers)

    def is_token(self, token: str) -> bool:
        return is_same_key(token, self.token)

    def new_session(self, secret: str, now: float | None = None) -> str:
        """Return the cookie for a page's secret."""
        end = int((time.time() if now is None else now) + SESSION_SECONDS)
        held = f"{end}.{self._signed('secret', secret)}"
        return f"{held}.{self._signed('session', held)}"

    def is_session(self, cookie: str, now: float | None = None) -> bool:
        held, _, signature = cookie.rpartition(".")
        if not is_same_key(signature, self._signed("session", held)):
            return False
        return int(held.partition(".")[0]) > (time.time() if now is None else now)  # signed: a number

    def is_secret(self, secret: str, cookie: str) -> bool:
        """Return whether the secret belongs to the cookie."""
        return self.is_session(cookie) and is_same_key(self._signed("secret", secret), cookie.split(".")[1])

    def is_known(self, headers: Mapping[str, str], cookies: Mapping[str, str]) -> bool:
        """Return whether the request has the token, or a session made with it."""
        return self._has_bearer(headers) or self.is_session(cookies.get(self.cookie_name, ""))

    def may_look(self, headers: Mapping[str, str], cookies: Mapping[str, str]) -> bool:
        is_for_all = not self.listens_beyond_loopback and not self.public
        return is_for_all or self.is_known(headers, cookies)

    def why_not_change(self, headers: Mapping[str, str], cookies: Mapping[str, str]) -> str:
        """Return why a change is refused; empty when it is allowed."""
        if self._has_bearer(headers):  # no other website can make a browser send this header
            return ""
        cookie = cookies.get(self.cookie_name, "")
        if not self.is_session(cookie):
            return "a change needs the token that `craton ui` printed: open its link, or send it as a bearer token"
        if not self.is_same_origin(headers):
            return "a change must be sent by a page of this server"
        if not self.is_secret(headers.get(SECRET_HEADER, ""), cookie):
            return "this page is not logged in, or another page logged in since: enter the token of `craton ui`"
        return ""

    def _has_bearer(self, headers: Mapping[str, str]) -> bool:
        kind, _, token = headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and self.is_token(token.strip())

    def _signed(self, purpose: str, text: str) -> str:
        return hmac.new(key_bytes(self.token), key_bytes(f"{purpose} {self.port} {text}"), hashlib.sha256).hexdigest()


def public_origin(url: str) -> str:
    """Return the origin that browsers send for `--public-url`: without the default port."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise AccessError(f"--public-url {url!r} is not a URL: give https://HOST") from None
    shown = f"[{host}]" if ":" in host else host
    is_host = host_name(shown) is not None and parts.username is None
    if parts.scheme != "https" or not is_host or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise AccessError(
            f"--public-url {url!r} is not valid: it must use https and have no path after the host: give https://HOST"
        )
    return f"https://{shown}" + (f":{port}" if port not in (None, 443) else "")
