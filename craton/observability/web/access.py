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
import ipaddress
import os
import re
import secrets
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from craton.errors import CratonError

SESSION_SECONDS = 7 * 86400
LEAST_TOKEN_CHARACTERS = 16
SECRET_HEADER = "x-craton-secret"
# A name or an address, and a port; whatever else stands there (a path, a question mark) would end up in addresses.
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?")
LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost")


class AccessError(CratonError):
    """A token file that cannot be used, or an address that must not be listened at."""


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
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = found[1].strip("[]").lower()
        return self.listens_beyond_loopback or is_loopback(name) or name == urlsplit(self.public).hostname

    def is_same_origin(self, headers: Mapping[str, str]) -> bool:
        """Whether a browser says that a page of this server sent it. One that does not say is not believed."""
        if headers.get("sec-fetch-site", "same-origin") != "same-origin":
            return False
        if self.public and headers.get("origin", "") == self.public:  # a proxy may have put another name into Host
            return True
        origin = urlsplit(headers.get("origin", ""))
        return origin.scheme in ("http", "https") and bool(origin.netloc) and origin.netloc == headers.get("host", "")

    def is_token(self, given: str) -> bool:
        return _is_same(given, self.token)

    def new_session(self, secret: str, now: float | None = None) -> str:
        """What a cookie holds beside the secret of a page."""
        end = int((time.time() if now is None else now) + SESSION_SECONDS)
        held = f"{end}.{self._signed('secret', secret)}"
        return f"{held}.{self._signed('session', held)}"

    def is_session(self, cookie: str, now: float | None = None) -> bool:
        held, _, signature = cookie.rpartition(".")
        if not _is_same(signature, self._signed("session", held)):
            return False
        return int(held.partition(".")[0]) > (time.time() if now is None else now)  # it is ours: it has a number

    def is_secret(self, secret: str, cookie: str) -> bool:
        """Whether a page has the secret that was given to it together with the cookie."""
        return self.is_session(cookie) and _is_same(self._signed("secret", secret), cookie.split(".")[1])

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
        kind, _, given = headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and self.is_token(given.strip())

    def _signed(self, purpose: str, text: str) -> str:
        return hmac.new(_bytes(self.token), _bytes(f"{purpose} {self.port} {text}"), hashlib.sha256).hexdigest()


def public_origin(url: str) -> str:
    """The origin that browsers name for an address of `--public-url`: no port where it is the usual one."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise AccessError(f"--public-url {url!r} is no address: write https://HOST") from None
    shown = f"[{host}]" if ":" in host else host
    is_host = _HOST.fullmatch(shown) is not None and parts.username is None
    if parts.scheme != "https" or not is_host or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise AccessError(
            f"--public-url {url!r} is not where a proxy could serve the page: it has TLS and nothing behind the host: "
            "write https://HOST"
        )
    return f"https://{shown}" + (f":{port}" if port not in (None, 443) else "")


def is_loopback(name: str) -> bool:
    """Whether a host's name or address is this machine and no other."""
    if name.lower().rstrip(".") in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def read_token(path: Path | None) -> str:
    """The token in a file that only its owner may read; a new one is written there where there is no file, and made up
    where no file is named."""
    if path is None:
        return secrets.token_urlsafe(32)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return _existing_token(path)
    except OSError as error:
        raise AccessError(f"the token file {path} cannot be written: {error.strerror}") from None
    token = secrets.token_urlsafe(32)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(token + "\n")
    return token


def _existing_token(path: Path) -> str:
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise AccessError(f"others can read the token file {path}; `chmod 600 {path}` keeps it to you")
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise AccessError(f"the token file {path} cannot be read: {error}") from None
    if len(token) < LEAST_TOKEN_CHARACTERS:
        raise AccessError(
            f"the token in {path} has {len(token)} characters and needs {LEAST_TOKEN_CHARACTERS}; remove the file to "
            "get a new one"
        )
    return token


def _is_same(given: str, right: str) -> bool:
    return hmac.compare_digest(_bytes(given), _bytes(right))


def _bytes(text: str) -> bytes:
    """Also of what is no text at all, as JSON can write it (half a surrogate pair)."""
    return text.encode(errors="surrogatepass")
