"""A teacher behind an endpoint: asked for given token ids, with a key that is shown nowhere, and checked before use."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from craton.job.sections.posttraining import ApiEndpoint
from craton.ml.serving.clients.teacher import TeacherEndpoint, TeacherError

SECRET = "sk-very-secret"


class Handler(BaseHTTPRequestHandler):
    """log p of token t is -t / 100; what `server.answers` has differs."""

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != f"Bearer {SECRET}":
            self._send(401, {"error": f"wrong key {self.headers['Authorization']}"})
            return
        places = [None, *({str(token): {"logprob": -token / 100}} for token in request["prompt"][1:])]
        choice = {"text": "", **({"prompt_logprobs": places} if self.server.has_logprobs else {})}  # type: ignore[attr-defined]
        self._send(200, {"choices": [choice]})

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("TEACHER_KEY", SECRET)
    serving: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving.has_logprobs = True
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    yield serving
    serving.shutdown()
    serving.server_close()


def endpoint(server: Any) -> ApiEndpoint:
    return ApiEndpoint(url=f"http://127.0.0.1:{server.server_port}", key="TEACHER_KEY")


def test_it_says_how_likely_given_tokens_are(server: Any) -> None:
    teacher = TeacherEndpoint(endpoint(server))
    teacher.check()
    sequences = [[1, 2, 3], [4, 5], list(range(20))]
    found = teacher.read(sequences, lambda: None)
    assert [len(values) for values in found] == [2, 1, 19]
    assert np.allclose(found[0], [-0.02, -0.03])


def test_an_endpoint_without_logprobs_is_refused(server: Any) -> None:
    server.has_logprobs = False
    with pytest.raises(TeacherError, match="returns no log-probabilities of given tokens"):
        TeacherEndpoint(endpoint(server)).check()


def test_the_key_is_in_no_message(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", "sk-another-secret")
    with pytest.raises(TeacherError) as raised:
        TeacherEndpoint(endpoint(server)).check()
    assert "sk-another-secret" not in str(raised.value)
    assert "401" in str(raised.value)
    monkeypatch.delenv("TEACHER_KEY")
    with pytest.raises(TeacherError, match="the variable TEACHER_KEY is not set"):
        TeacherEndpoint(endpoint(server))
