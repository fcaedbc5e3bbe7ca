"""Serve the page: on loopback by default, and beyond it or through a proxy only with a token."""

from __future__ import annotations

import html
import logging
import os
import socket
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from craton.extras import require_extra
from craton.http_guard import AccessError, is_loopback, read_token
from craton.limits import name_limit, raise_file_limit
from craton.observability.web.http.access import Access, public_origin
from craton.observability.web.sources import prometheus_address

SWITCH_SECONDS = 0.0005


def serve_page(
    root: Path,
    *,
    port: int,
    listen: str = "127.0.0.1",
    token_file: Path | None = None,
    public_url: str | None = None,
    prometheus: str | None = None,
    opens: bool = False,
    announce: Callable[[str, str], None],
) -> None:
    """Serve until interrupted. `tell` gets the address, and a link with the token unless a token file has it."""
    prometheus = prometheus_address(prometheus)
    origin = public_origin(public_url) if public_url else ""
    require_extra("observe", "`craton ui`", ("jinja2", "starlette", "uvicorn"))
    import uvicorn

    from craton.observability.web.http.application import make_app
    from craton.observability.web.http.guard import server_config

    logging.getLogger("asyncio").addFilter(name_limit)
    raise_file_limit()  # every open page holds a connection
    listener = _listener(listen, port)
    port = listener.getsockname()[1]
    access = Access(read_token(token_file), not is_loopback(listen), port, origin)
    shown = f"[{listen}]" if ":" in listen else listen
    address = f"{origin or f'http://{shown}:{port}'}/"
    # Browsers do not send a fragment to servers, so it is in no log; the page removes it from the address bar.
    link = address if token_file else f"{address}#token={access.token}"
    app = make_app(root, access, prometheus=prometheus)
    config = server_config(app)
    # Threads that read runs compute a lot; requests must not wait long for the GIL.
    sys.setswitchinterval(SWITCH_SECONDS)
    announce(address, link)
    with _openable(link, is_secret=opens and token_file is None) as opened:
        if opens:
            webbrowser.open(opened)
        uvicorn.Server(config).run(sockets=[listener])


@contextmanager
def _openable(link: str, is_secret: bool) -> Iterator[str]:
    """Yield the address for the browser to open. Command lines are readable by everyone on a machine, so a link with
    the token is in a redirect file that only its owner can read."""
    if not is_secret:
        yield link
        return
    descriptor, name = tempfile.mkstemp(prefix="craton-", suffix=".html")  # readable only by its owner
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            target = html.escape(link)
            file.write(f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={target}">\n')
            file.write(f'<a href="{target}">all runs</a>\n')
        yield Path(name).as_uri()
    finally:
        Path(name).unlink(missing_ok=True)


def _listener(host: str, port: int) -> socket.socket:
    try:
        kind, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise AccessError(f"--listen {host!r} is not an address of this machine: {error.strerror}") from None
    listener = socket.socket(kind, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(place)
        listener.listen(128)  # clients may connect before the server runs
    except OSError as error:
        listener.close()
        raise AccessError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port (0: any free one)"
        ) from None
    return listener


def can_open() -> bool:
    """Return whether a browser can be opened: not over SSH, not without a display."""
    if not sys.stdout.isatty() or os.environ.get("SSH_CONNECTION"):
        return False
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
