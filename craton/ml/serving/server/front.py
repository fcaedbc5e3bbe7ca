"""The front end's process. Exit status 0: drained after SIGTERM or SIGINT; 1: the engine failed; 2: it cannot start.

The first of these signals drains: /health and new requests get 503, running requests may finish within --drain-seconds.
A second one ends it at once.
"""

from __future__ import annotations

import argparse
import errno
import json
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType
from typing import get_args

import uvicorn

from craton.errors import CratonError
from craton.http_guard import BoundedHttpTools, ConnectionLimits
from craton.limits import file_shortage, name_limit, raise_file_limit
from craton.log_levels import configure_logging
from craton.ml.serving.server.access import ADMIN_VARIABLE, KEYS_VARIABLE, ServerAccess, read_admin_key, read_api_keys
from craton.ml.serving.server.app import make_app
from craton.ml.serving.server.errors import UnavailableError
from craton.ml.serving.server.http_service import HttpService
from craton.ml.serving.server.link import EngineLink
from craton.ml.serving.server.settings import ReasoningStyle, ServerSettings, ToolStyle
from craton.ml.serving.server.strategies import open_offer
from craton.ml.serving.server.wire import Wire

FLUSH_SECONDS = 5  # for clients to receive the end of their answers
BACKLOG = 2048
PORT_LOOK_SECONDS = 0.02
FILES_TICKS = 100  # between two checks of the number of open files
RESERVED_FILES = 128  # in addition to one connection for every request that may wait

logger = logging.getLogger("craton.serving")


def connections_for(client_seconds: float) -> type[BoundedHttpTools]:
    """Return a connection class that allows `client_seconds` for the request head, 6 times that for the body, and 3
    times that to receive an answer. All clients of a proxy are one peer, so one peer may have most connections."""
    bounds = ConnectionLimits(client_seconds, 6 * client_seconds, 3 * client_seconds, per_peer=6144, total=8192)

    class ClientConnection(BoundedHttpTools):
        limits = bounds

    return ClientConnection


class FrontEnd(uvicorn.Server):
    """Serves until it is drained or its engine fails."""

    def __init__(self, config: uvicorn.Config, service: HttpService) -> None:
        super().__init__(config)
        self.has_failed = False
        self._service = service
        self._deadline = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start draining on the first signal, end at once on the second."""
        if self._service.is_draining:
            self._deadline = 0.0
            return
        logger.info("%s: draining for up to %g s", signal.Signals(sig).name, self._service.settings.drain_seconds)
        self._deadline = time.monotonic() + self._service.settings.drain_seconds
        self._service.is_draining = True

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end; uvicorn calls it ten times a second."""
        if counter % FILES_TICKS == 0 and (shortage := file_shortage()):
            logger.warning("connections may be dropped: %s", shortage)
        if self.has_failed or (self._service.is_draining and not self.server_state.tasks):
            self.should_exit = True
        elif self._service.is_draining and time.monotonic() > self._deadline:
            self._service.link.fail_all(UnavailableError("the server is shutting down", code="draining"))
            self.should_exit = True
        return await super().on_tick(counter)

    def engine_ended(self, num_failed: int) -> None:
        """Note the engine's end: a failure, unless the server drains and no request was open."""
        self.has_failed = bool(num_failed) or not self._service.is_draining


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    configure_logging(default="info", is_strict=False)
    logging.getLogger("asyncio").addFilter(name_limit)
    if complaint := raise_file_limit(RESERVED_FILES + options.max_waiting):
        logger.warning("%s; until then connections beyond the limit are not accepted", complaint)
    try:
        settings = ServerSettings(
            served_name=options.served_name,
            model_folder=options.model_folder,
            access=ServerAccess(
                options.host,
                read_api_keys(options.api_key_file, options.keys_of),
                read_admin_key(options.admin_key_file, options.admin_key_of) if options.admin else None,
            ),
            tool_style=options.tool_parser,
            reasoning_style=options.reasoning_parser,
            max_waiting=options.max_waiting,
            max_body_bytes=options.max_body,
            request_seconds=options.request_timeout,
            silent_seconds=options.silent_seconds,
            drain_seconds=options.drain_seconds,
        )
        folder = os.environ.get("CRATON_JOB_FOLDER")
        code_folder = None if folder is None else Path(folder)
        offer = open_offer(json.loads(options.strategies), code_folder, options.model_folder)
        link = EngineLink(Wire(options.connection))
        service = HttpService(settings, link)
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        listener = _listen(options.host, options.port, family, options.port_seconds)
    except (CratonError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    config = uvicorn.Config(
        make_app(service, offer),
        http=connections_for(options.client_seconds),
        ws="none",
        log_level="warning",
        access_log=False,
        lifespan="on",
        backlog=BACKLOG,
        timeout_graceful_shutdown=FLUSH_SECONDS,
        server_header=False,
    )
    server = FrontEnd(config, service)
    link.on_end = server.engine_ended
    host = f"[{options.host}]" if ":" in options.host else options.host
    print(f"listening on http://{host}:{listener.getsockname()[1]}", flush=True)
    try:
        server.run(sockets=[listener])
    finally:
        offer.verifiers.close()
    return int(server.has_failed)


def _listen(host: str, port: int, family: socket.AddressFamily, seconds: float) -> socket.socket:
    """Listen at an address, which the front end before this one may still hold for a moment."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
        time.sleep(PORT_LOOK_SECONDS)


def _parser() -> argparse.ArgumentParser:
    default = ServerSettings()
    parser = argparse.ArgumentParser(prog="python -m craton.ml.serving.server", description="The HTTP front end")
    add = parser.add_argument
    add("--connection", type=int, required=True, metavar="FD", help="file descriptor of the connection to the engine")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000, help="port to listen on; 0: any free one, which is printed (default: 8000)")
    add("--port-seconds", type=float, default=0.0, help="how long to wait for a port that is in use (default: 0)")
    add("--served-name", help="model name for clients (default: the engine's)")
    add("--model-folder", type=Path, help="folder with the tokenizer; without it only token ids are accepted")
    add("--api-key-file", type=Path, help=f"file with one API key per line (default: ${KEYS_VARIABLE}, else no key)")
    add("--keys-of", metavar="NAME", help=f"name of the variable behind ${KEYS_VARIABLE}; it must have a key")
    add("--admin", action="store_true", help="serve the admin endpoints, which need the admin key")
    add("--admin-key-file", type=Path, help=f"file with the admin key, created if missing (default: ${ADMIN_VARIABLE})")
    add("--admin-key-of", metavar="NAME", help=f"name of the variable behind ${ADMIN_VARIABLE}")
    add("--tool-parser", choices=get_args(ToolStyle), default=default.tool_style)
    add("--reasoning-parser", choices=get_args(ReasoningStyle), default=default.reasoning_style)
    add(
        "--strategies",
        default="{}",
        metavar="JSON",
        help="keys of a serve: section: strategy, strategies, verifiers, verify, reward_memory, precision",
    )
    add("--max-waiting", type=int, default=default.max_waiting, help="maximum requests without a token; more get 429")
    add("--max-body", type=int, default=default.max_body_bytes, metavar="BYTES", help="0: by the context length")
    add("--request-timeout", type=float, default=default.request_seconds, metavar="SECONDS", help="0: no timeout")
    add("--client-seconds", type=float, default=10.0, help="timeout of a request's head; 6 times that for its body")
    add("--silent-seconds", type=float, default=default.silent_seconds, help="/health reports a hung engine after this")
    add("--drain-seconds", type=float, default=default.drain_seconds)
    return parser
