"""The page, served in this process at a port of its own, and raw requests to it with any header one likes."""

from __future__ import annotations

import http.client
import json
import threading
from pathlib import Path
from typing import Any

import uvicorn
from waiting import PATIENCE_SECONDS

from craton.observability.web.http.access import Access
from craton.observability.web.http.application import make_app
from craton.observability.web.http.guard import server_config
from craton.observability.web.sources import CachedVerdict, Verdicts
from craton.telemetry import RunDirectory

TOKEN = "the-token-of-this-test-and-no-other"


class PageServer:
    """`craton ui` without its process; verdicts are made by `examine`."""

    def __init__(self, root: Path, beyond: bool = False, public: str = "", **options: Any) -> None:
        import socket

        listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(listener.getsockname()[1])
        self.address = f"http://127.0.0.1:{self.port}/"
        self.access = Access(TOKEN, beyond, self.port, public)
        options.setdefault("verdicts", Verdicts(all_is_well))
        app = make_app(root, self.access, **options)
        self._server = uvicorn.Server(server_config(app, log_level="error"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()

    @property
    def link(self) -> str:
        """What `craton ui` prints."""
        return f"{self.address}#token={TOKEN}"

    @property
    def num_connections(self) -> int:
        return len(self._server.server_state.connections)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=PATIENCE_SECONDS)
        assert not self._thread.is_alive()

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, str], str]:
        """(status, headers, body); a header that is given replaces the usual one, `_` stands for `-`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS)
        try:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.putrequest(method, path, skip_host="host" in sent)
            for name, value in {"content-length": str(len(body)), **sent}.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            told = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, told, answer.read().decode()
        finally:
            connection.close()

    def log_in(self) -> dict[str, str]:
        """Headers of a page that has logged in."""
        origin = self.address.rstrip("/")
        body = json.dumps({"token": TOKEN}).encode()
        status, headers, told = self.ask("POST", "/login", body, origin=origin, content_type="application/json")
        assert status == 200
        cookie = headers["set-cookie"].partition(";")[0]
        return {"cookie": cookie, "origin": origin, "x-craton-secret": json.loads(told)["secret"]}


def all_is_well(run: RunDirectory) -> CachedVerdict:
    return CachedVerdict("healthy", f"{run.name} does what was planned", confidence=0.9)
