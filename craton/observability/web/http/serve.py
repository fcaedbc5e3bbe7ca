"""Listening: on loopback unless told otherwise, and never beyond it without a token, also not through a proxy."""

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
    """Serves until it is interrupted. `tell` is told the address, and a link with the token where no file holds it."""
    prometheus = prometheus_address(prometheus)
    origin = public_origin(public_url) if public_url else ""
    require_extra("observe", "`craton ui`", ("jinja2", "starlette", "uvicorn"))
    import uvicorn

    from craton.observability.web.http.application import make_app
    from craton.observability.web.http.guard import server_config

    logging.getLogger("asyncio").addFilter(name_limit)
    raise_file_limit()  # every open page is a connection
    listener = _listener(listen, port)
    port = listener.getsockname()[1]
    access = Access(read_token(token_file), not is_loopback(listen), port, origin)
    shown = f"[{listen}]" if ":" in listen else listen
    address = f"{origin or f'http://{shown}:{port}'}/"
    # A fragment is not sent to servers, and not written into their logs; the page takes it out of its address.
    link = address if token_file else f"{address}#token={access.token}"
    app = make_app(root, access, prometheus=prometheus)
    config = server_config(app)
    # Runs are read by threads that compute; a page that is asked for meanwhile must not wait its turn for long.
    sys.setswitchinterval(SWITCH_SECONDS)
    announce(address, link)
    with _openable(link, is_secret=opens and token_file is None) as opened:
        if opens:
            webbrowser.open(opened)
        uvicorn.Server(config).run(sockets=[listener])


@contextmanager
def _openable(link: str, is_secret: bool) -> Iterator[str]:
    """What a browser is told to open. Everybody on a machine can read command lines, so a link with the token is in a
    file that only its owner may read, and that leads there."""
    if not is_secret:
        yield link
        return
    descriptor, name = tempfile.mkstemp(prefix="craton-", suffix=".html")  # readable by its owner alone
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            target = html.escape(link)
            file.write(f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={target}">\n')
            file.write(f'<a href="{target}">the page of all runs</a>\n')
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
        listener.listen(128)  # whoever is told the address may come before the server runs
    except OSError as error:
        listener.close()
        raise AccessError(
            f"{host}:{port} cannot be listened at: {error.strerror}; give another --port (0 takes a free one)"
        ) from None
    return listener


def can_open() -> bool:
    """Whether a browser of the person at this terminal could be opened: not over SSH, not without a screen."""
    if not sys.stdout.isatty() or os.environ.get("SSH_CONNECTION"):
        return False
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
