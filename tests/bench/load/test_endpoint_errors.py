"""Servers that cannot be driven: one line that says what is wrong and what to do, before any load."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from openai_like_server import Behaviour, Server, openai_like_server
from waiting import PATIENCE_SECONDS

from craton.bench.load import Closed, Limit, LoadSettings, LoadTarget, LoadWorkload, bench_serve
from craton.bench.load.errors import EndpointError, WorkloadError
from craton.bench.load.lengths import Lengths
from craton.bench.load.requests import Request


def drive(url: str, trace: tuple[Request, ...] = (), **target: Any) -> None:
    workload = LoadWorkload(Lengths("fixed", 20), Lengths("fixed", 4), trace=trace)
    report = bench_serve(LoadSettings(LoadTarget(url, **target), workload, Closed(1), Limit(requests=1)))
    assert report.shown.summary.answered == 1


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        assert isinstance(port, int)
        return port


@contextmanager
def speaks(answer: bytes) -> Iterator[str]:
    """A port that answers everybody with the same bytes, and then hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer_all() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        thread = threading.Thread(target=answer_all, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
    thread.join(timeout=PATIENCE_SECONDS)


def test_nobody_there() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EndpointError, match=rf"^{url}: cannot connect \(Connection refused\).*the port is right"):
        drive(url)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://localhost", ""])
def test_not_an_address(url: str) -> None:
    with pytest.raises(EndpointError, match="must begin with http:// or https://"):
        drive(url)


def test_an_address_without_a_host() -> None:
    with pytest.raises(EndpointError, match="not a valid URL"):
        drive("http://")


@pytest.mark.parametrize(
    ("answer", "message"),
    [(b"", "closed the connection before it replied"), (b"SSH-2.0-OpenSSH_9.0\r\n", "does not speak HTTP correctly")],
)
def test_something_else_than_a_web_server(answer: bytes, message: str) -> None:
    with speaks(answer) as url, pytest.raises(EndpointError, match=message):
        drive(url)


def test_a_server_that_takes_connections_and_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(EndpointError, match="accepts connections but does not answer"):
            drive(url, timeout_seconds=0.2)


def test_keys() -> None:
    with openai_like_server(Behaviour(key="secret")) as server:
        drive(server.url, api_key="secret")
        with pytest.raises(EndpointError, match="requires an API key"):
            drive(server.url)
        with pytest.raises(EndpointError, match=r"rejects this API key .*OPENAI_API_KEY") as caught:
            drive(server.url, api_key="guessed")
        assert "guessed" not in str(caught.value)


def test_models(server: Server) -> None:
    server.behaviour.models = ("llama-8b", "qwen")
    drive(server.url, model="qwen")
    with pytest.raises(
        EndpointError, match=r"no model 'lama-8b'; available: llama-8b, qwen; did you mean 'llama-8b'\?"
    ):
        drive(server.url, model="lama-8b")
    drive(server.url)
    assert server.behaviour.received[-1]["model"] == "llama-8b"


def test_a_server_that_does_not_list_its_models(server: Server) -> None:
    server.behaviour.lists_models = False
    with pytest.raises(EndpointError, match=r"HTTP 404 at /v1/models\); name one with --model"):
        drive(server.url)
    drive(server.url, model="tiny")
    with pytest.raises(EndpointError, match=r"HTTP 404 at /v1/completions .*The model `other` does not exist"):
        drive(server.url, model="other")


def test_no_streaming(server: Server) -> None:
    server.behaviour.streams = False
    with pytest.raises(EndpointError, match=r"does not stream \(application/json"):
        drive(server.url)


def test_a_server_that_refuses_everything(server: Server) -> None:
    server.behaviour.fails = dict.fromkeys(range(10), "500")
    with pytest.raises(EndpointError, match=r"fails a trial request \(HTTP 500: overloaded"):
        drive(server.url)


def test_an_empty_answer_to_the_trial_is_no_refusal(server: Server) -> None:
    server.behaviour.fails = {0: "empty"}
    drive(server.url)


@pytest.mark.parametrize("ending", ["/", "/v1", "/v1/"])
def test_the_address_may_end_as_clients_have_it(server: Server, ending: str) -> None:
    drive(server.url + ending)


def test_ids_in_a_chat(server: Server) -> None:
    with pytest.raises(WorkloadError, match="chats do not accept"):
        drive(server.url, trace=(Request([1, 2], 3),), chat=True)
