"""Who may look at the page and who may change a run, decided from a request's headers alone.

- On loopback everybody on this machine may look; beyond it, and behind a proxy, looking needs the token too.
- A change (stop, resume, heal) always needs it, by POST: as `Authorization: Bearer TOKEN`, or as what a login gives: a
  cookie and a secret, and then only from a page of this very server.
- Browsers send a cookie to every port of a host, where others may listen. So the cookie is good for looking only: the
  secret, of which it holds no more than a keyed hash, is kept by the page for its own origin, and no page holds it.
- On loopback a request must name this machine in its Host header, or the address that a proxy is known by: a website
  whose name was pointed at 127.0.0.1 (DNS rebinding) names itself there.

The cookie is signed with the token and holds the moment of its end, so that nothing is kept here and a restart with the
same token file logs nobody out.
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
    """The rules of one server. `port` names its cookie: browsers send cookies to every port of a host. `public` is the
    origin (`https://HOST`) of a proxy in front of it, which anybody may come through; empty where there is none."""

    token: str
    listens_beyond_loopback: bool
    port: int
    public: str = ""

    @property
    def cookie_name(self) -> str:
        return f"craton-{self.port}"

    def knows_host(self, host: str) -> bool:
        """Whether a request is for this server by the name it used."""
        name = host_name(host)
        if name is None:
            return False
        return self.listens_beyond_loopback or is_loopback(name) or name == urlsplit(self.public).hostname

    def is_same_origin(self, headers: Mapping[str, str]) -> bool:
        """Whether a browser says that a page of this server sent it. One that does not say is not believed."""
        origin = headers.get("origin", "")
        if self.public and origin == self.public:  # a proxy may have put another name into Host
            return headers.get("sec-fetch-site", "same-origin") == "same-origin"
        return bool(origin) and not is_foreign(headers)

    def is_token(self, token: str) -> bool:
        return is_same_key(token, self.token)

    def new_session(self, secret: str, now: float | None = None) -> str:
        """What a cookie holds beside the secret of a page."""
        end = int((time.time() if now is None else now) + SESSION_SECONDS)
        held = f"{end}.{self._signed('secret', secret)}"
        return f"{held}.{self._signed('session', held)}"

    def is_session(self, cookie: str, now: float | None = None) -> bool:
        held, _, signature = cookie.rpartition(".")
        if not is_same_key(signature, self._signed("session", held)):
            return False
        return int(held.partition(".")[0]) > (time.time() if now is None else now)  # it is ours: it has a number

    def is_secret(self, secret: str, cookie: str) -> bool:
        """Whether a page has the secret that was given to it together with the cookie."""
        return self.is_session(cookie) and is_same_key(self._signed("secret", secret), cookie.split(".")[1])

    def is_known(self, headers: Mapping[str, str], cookies: Mapping[str, str]) -> bool:
        """Whether a request comes from somebody who has the token."""
        return self._has_bearer(headers) or self.is_session(cookies.get(self.cookie_name, ""))

    def may_look(self, headers: Mapping[str, str], cookies: Mapping[str, str]) -> bool:
        is_for_all = not self.listens_beyond_loopback and not self.public
        return is_for_all or self.is_known(headers, cookies)

    def why_not_change(self, headers: Mapping[str, str], cookies: Mapping[str, str]) -> str:
        """Empty when a change is allowed."""
        if self._has_bearer(headers):  # no website can make a browser send this header here
            return ""
        cookie = cookies.get(self.cookie_name, "")
        if not self.is_session(cookie):
            return "a change needs the token that `craton ui` printed: open its link, or send it as a bearer token"
        if not self.is_same_origin(headers):
            return "a change must come from a page of this server"
        if not self.is_secret(headers.get(SECRET_HEADER, ""), cookie):
            return "this page has not logged in, or another page did since: give the token that `craton ui` printed"
        return ""

    def _has_bearer(self, headers: Mapping[str, str]) -> bool:
        kind, _, token = headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and self.is_token(token.strip())

    def _signed(self, purpose: str, text: str) -> str:
        return hmac.new(key_bytes(self.token), key_bytes(f"{purpose} {self.port} {text}"), hashlib.sha256).hexdigest()


def public_origin(url: str) -> str:
    """The origin that browsers name for an address of `--public-url`: no port where it is the usual one."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise AccessError(f"--public-url {url!r} is no address: write https://HOST") from None
    shown = f"[{host}]" if ":" in host else host
    is_host = host_name(shown) is not None and parts.username is None
    if parts.scheme != "https" or not is_host or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise AccessError(
            f"--public-url {url!r} is not where a proxy could serve the page: it has TLS and nothing behind the host: "
            "write https://HOST"
        )
    return f"https://{shown}" + (f":{port}" if port not in (None, 443) else "")
