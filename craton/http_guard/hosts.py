"""Host and Origin headers: the name a request was sent to, and whether a browser sent it for a page of another site.

A website can point its own name at 127.0.0.1 (DNS rebinding): its requests then carry that name in Host. And any page
can make a browser POST to loopback: then Origin or Sec-Fetch-Site names the other site. Programs (curl, SDKs) send
neither. A request with one of these headers twice is refused: a proxy may have checked the other one.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost")
# A name or an address, and a port; anything else (a path, a question mark) would end up in URLs.
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")
MAX_PORT = 65535
SINGLE_HEADERS = ("host", "origin", "sec-fetch-site", "authorization")  # access is decided by these
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


def is_loopback(name: str) -> bool:
    """Return whether a host name or address is a loopback one."""
    if name.lower().rstrip(".") in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def host_name(host: str) -> str | None:
    """Return the name in a Host header, in lower case and without port and brackets; None when malformed."""
    match = _HOST.fullmatch(host)
    if match is None or int((match[2] or ":0")[1:]) > MAX_PORT:
        return None
    return match[1].strip("[]").lower()


def repeated_header(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return an error for the first of SINGLE_HEADERS that a request has twice (RFC 9112, 3.2); None if there is none.
    Header names are in lower case, as in ASGI."""
    names = [name for name, _ in headers]
    for name in SINGLE_HEADERS:
        if (count := names.count(name.encode())) > 1:
            return f"the request has {count} {name.title()} headers; send it once"
    return None


def is_foreign(headers: Mapping[str, str]) -> bool:
    """Return whether the headers show that a page of another origin sent this request. Header names are lower case."""
    if headers.get("sec-fetch-site", "same-origin") != "same-origin":
        return True
    if (origin_header := headers.get("origin")) is None:
        return False
    try:
        origin = urlsplit(origin_header)
    except ValueError:
        return True
    if origin.scheme not in _DEFAULT_PORTS or not origin.netloc:  # also "null", from a page without an origin
        return True
    port = _DEFAULT_PORTS[origin.scheme]
    return origin.netloc.lower().removesuffix(port) != headers.get("host", "").lower().removesuffix(port)
