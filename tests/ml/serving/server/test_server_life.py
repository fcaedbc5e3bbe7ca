"""A front end from its start to its end: loading, keys, many clients, those who leave, drains, and a lost engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import requests
from scripted_engine import ADMIN_KEY, SECONDS, Script, ScriptedEngine, Served
from waiting import wait_until

from craton.ml.serving.messages import Abort, Submit

Encode = Callable[[str], list[int]]
Start = Callable[..., Served]
ASK: Any = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"
NUM_CLIENTS = 200


def health(served: Served) -> tuple[int, str]:
    answer = requests.get(served.url + "/health", timeout=SECONDS)
    return answer.status_code, answer.json()["status"]


def ask(served: Served, **body: Any) -> requests.Response:
    return requests.post(served.url + CHAT, json={"messages": ASK, **body}, timeout=SECONDS)


def open_stream(served: Served, body: dict[str, Any]) -> socket.socket:
    """A request on a bare socket, which can be closed at any moment."""
    host, port = served.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    connection = socket.create_connection((host, int(port)), timeout=SECONDS)
    connection.sendall(head.encode() + data)
    return connection


def read_until(connection: socket.socket, text: bytes) -> bytes:
    found = b""
    while text not in found:
        part = connection.recv(65536)
        assert part, f"the connection ended with {found!r}"
        found += part
    return found


def test_it_loads_before_it_answers(start: Start, encode: Encode) -> None:
    served = start(is_ready=False)
    served.engine.answer = lambda _: Script(encode("hello"))
    assert health(served) == (503, "loading")
    answer = ask(served)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "loading")
    assert requests.get(served.url + "/metrics", timeout=SECONDS).status_code == 200
    served.engine.send(served.engine.ready)
    wait_until(lambda: health(served) == (200, "ready"))
    assert requests.get(served.url + "/ping", timeout=SECONDS).status_code == 200
    assert ask(served).status_code == 200


def test_neither_torch_nor_transformers_are_loaded(model_folder: Path) -> None:
    program = (
        "import sys; from pathlib import Path; import craton.ml.serving.server.__main__\n"
        "from craton.ml.serving.text import load_template\n"
        "from craton.ml.serving.text import Vocabulary\n"
        f"folder = Path({str(model_folder)!r})\n"
        "Vocabulary(folder); load_template(folder).render([{'role': 'user'}])\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_two_hundred_clients_stream_at_once(start: Start, encode: Encode) -> None:
    served = start()
    served.engine.answer = lambda submit: Script([*submit.prompt[:40], *encode(" 👧 world")], hold_at=1)

    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        arguments: Any = {"model": "scripted", "prompt": f"client {number:3d} says hello", "max_tokens": 100}
        stream = await client.completions.create(**arguments, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="-", max_retries=0) as client:
            tasks = [asyncio.create_task(one(client, number)) for number in range(NUM_CLIENTS)]
            # Nobody gets a second token until everybody has asked: they do stream at the same time.
            await asyncio.to_thread(served.engine.wait_for, Submit, NUM_CLIENTS)
            served.engine.release()
            return await asyncio.wait_for(asyncio.gather(*tasks), SECONDS)

    texts = asyncio.run(all_of_them())
    assert texts == [f"client {number:3d} says hello 👧 world" for number in range(NUM_CLIENTS)]
    assert health(served) == (200, "ready")
    assert not [message for message in served.engine.received if isinstance(message, Abort)]


@pytest.mark.slow
def test_ten_thousand_chunks_a_second(start: Start, encode: Encode) -> None:
    """Of the front end's own processor time, so that a busy machine does not matter."""
    served = start()
    num_streams, num_tokens = 32, 500
    served.engine.answer = lambda _: Script((encode("hello world ") * num_tokens)[:num_tokens], hold_at=1)
    with ThreadPoolExecutor(num_streams) as threads:
        body = {"stream": True, "max_tokens": num_tokens}
        streams = [threads.submit(ask, served, **body) for _ in range(num_streams)]
        served.engine.wait_for(Submit, num_streams)
        process = psutil.Process(served.process.pid)
        before = sum(process.cpu_times()[:2])
        served.engine.release()
        num_chunks = sum(stream.result(SECONDS).text.count("data: ") for stream in streams)
        seconds = sum(process.cpu_times()[:2]) - before
    assert num_chunks >= num_streams * num_tokens
    assert num_chunks / seconds > 10_000


@pytest.mark.parametrize(("is_stream", "hold_at"), [(True, 2), (True, 0), (False, 2), (False, 0)])
def test_who_leaves_is_aborted(served: Served, encode: Encode, is_stream: bool, hold_at: int) -> None:
    served.engine.answer = lambda _: Script(encode("hello world" * 20), hold_at=hold_at)
    connection = open_stream(served, {"messages": ASK, "stream": is_stream, "n": 2})
    (submit,) = served.engine.wait_for(Submit)
    if is_stream and hold_at:
        read_until(connection, b"llo")
    connection.close()
    assert served.engine.wait_for(Abort) == [Abort(submit.id, None)]
    served.engine.release()
    assert health(served) == (200, "ready")


def test_keys(start: Start, tmp_path: Path, encode: Encode) -> None:
    (tmp_path / "keys").write_text("first\nsecond\n")
    by_file = start("--api-key-file", str(tmp_path / "keys"), "--admin")
    by_variable = start(environment={"CRATON_API_KEYS": "first,second"})
    for served in (by_file, by_variable):
        served.engine.answer = lambda _: Script(encode("hello"))
        wait_until(lambda: requests.get(served.url + "/ping", timeout=SECONDS).status_code == 200)  # noqa: B023
        assert requests.get(served.url + "/metrics", timeout=SECONDS).status_code == 200
        for key in ("", "firs", "first ", "first\n", "First"):
            status, said = _with_key(served, "GET", "/v1/models", key)
            assert (status, "invalid_api_key" in said) == (
                200 if key.strip() == "first" else 401,
                key.strip() != "first",
            )
        with pytest.raises(openai.AuthenticationError):
            served.client("third").chat.completions.create(model="scripted", messages=ASK)
        answer = served.client("second").chat.completions.create(model="scripted", messages=ASK)
        assert answer.choices[0].message.content == "hello"
    assert _with_key(by_file, "POST", "/pause", "third")[0] == 401
    assert _with_key(by_file, "POST", "/pause", "second")[0] == 401, "an API key opens no admin endpoint"
    assert _with_key(by_file, "POST", "/pause", ADMIN_KEY)[0] == 200
    assert _with_key(by_file, "GET", "/v1/models", ADMIN_KEY)[0] == 401


def _with_key(served: Served, method: str, path: str, key: str) -> tuple[int, str]:
    """By hand, since a client refuses to send some keys."""
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=SECONDS) as connection:
        value = key.replace("\n", " ")
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer {value}\r\n\r\n"
        )
        connection.sendall(head.encode())
        said = b""
        while part := connection.recv(65536):
            said += part
    return int(said.split()[1]), said.decode()


@pytest.mark.parametrize("is_failure_said", [True, False])
def test_a_lost_engine_ends_everything(start: Start, encode: Encode, is_failure_said: bool) -> None:
    served = start()
    served.engine.answer = lambda submit: Script(encode("hello world"), hold_at=2 if submit.sampling.seed else 0)
    stream = served.client().chat.completions.create(model="scripted", messages=ASK, stream=True, seed=1)
    assert [next(iter(stream)).choices[0].delta.role, next(iter(stream)).choices[0].delta.content] == [
        "assistant",
        "he",
    ]
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(ask, served)
        served.engine.wait_for(Submit, 2)
        if is_failure_said:
            served.engine.fail("out of memory; lower --memory")
        else:
            served.engine.close()
        answer = waiting.result(SECONDS)
    reason = "out of memory; lower --memory" if is_failure_said else "its process exited"
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, f"the engine has failed: {reason}")
    with pytest.raises(openai.APIError, match=reason):
        list(stream)
    status, said = served.wait()
    assert (status, reason in said) == (1, True)


def test_an_engine_that_fails_to_load(start: Start) -> None:
    served = start(is_ready=False)
    served.engine.fail("there is no such model")
    status, said = served.wait()
    assert (status, "there is no such model" in said) == (1, True)


def drain(served: Served, encode: Encode, threads: ThreadPoolExecutor) -> Future[requests.Response]:
    """A request that runs while the front end is told to end."""
    served.engine.answer = lambda _: Script(encode("hello world"), hold_at=2)
    running = threads.submit(ask, served)
    served.engine.wait_for(Submit)
    served.signal()
    wait_until(lambda: health(served) == (503, "draining"))
    return running


def test_a_drain_finishes_what_runs(start: Start, encode: Encode) -> None:
    served = start("--drain-seconds", "60")
    with ThreadPoolExecutor() as threads:
        running = drain(served, encode, threads)
        until = time.monotonic() + 0.5  # several times as often as it asks itself whether to end
        while time.monotonic() < until:
            refused = ask(served)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert int(refused.headers["retry-after"]) >= 1
        served.engine.release()
        answer = running.result(SECONDS)
    assert answer.json()["choices"][0]["message"]["content"] == "hello world"
    assert served.wait()[0] == 0


def test_a_drain_does_not_last_for_ever(start: Start, encode: Encode) -> None:
    served = start("--drain-seconds", "0.5")
    with ThreadPoolExecutor() as threads:
        running = drain(served, encode, threads)
        answer = running.result(SECONDS)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
    (submit,) = served.engine.wait_for(Submit)
    assert served.engine.wait_for(Abort)[0].id == submit.id
    assert served.wait()[0] == 0


def test_a_second_signal_ends_at_once(start: Start, encode: Encode) -> None:
    served = start("--drain-seconds", "600")
    with ThreadPoolExecutor() as threads:
        running = drain(served, encode, threads)
        served.signal(signal.SIGINT)
        assert served.wait()[0] == 0
        assert running.result(SECONDS).status_code == 503


@pytest.mark.parametrize("problem", ["port", "folder", "keys", "variable"])
def test_what_it_cannot_start_with(problem: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\n")
    taken = socket.create_server(("127.0.0.1", 0))
    options, said = {
        "port": (["--port", str(taken.getsockname()[1])], "in use"),
        "folder": (["--model-folder", str(tmp_path)], "tokenizer.json"),
        "keys": (["--api-key-file", str(tmp_path / "keys")], "no API key"),
        "variable": (["--keys-of", "TEAM_KEYS"], "TEAM_KEYS, which has no key"),
    }[problem]
    engine = ScriptedEngine(lambda _: Script())
    command = [sys.executable, "-m", "craton.ml.serving.server", "--connection", str(engine.far_end), *options]
    environment = {**os.environ, "CRATON_API_KEYS": ", ,"}
    done = subprocess.run(
        command,
        pass_fds=[engine.far_end],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env=environment,
    )
    os.close(engine.far_end)
    engine.close()
    taken.close()
    assert (done.returncode, said in done.stderr, len(done.stderr.splitlines())) == (2, True, 1)


def test_an_engine_that_says_nothing_any_more_is_not_healthy(start: Start, encode: Encode) -> None:
    served = start("--silent-seconds", "0.4")
    served.engine.answer = lambda _: Script(encode("hello"), hold_at=1)
    assert health(served) == (200, "ready")
    with open_stream(served, {"messages": ASK, "stream": True}) as stream:
        read_until(stream, b"data:")
        wait_until(lambda: health(served) == (503, "silent"))
        served.engine.release()
        read_until(stream, b"[DONE]")
    wait_until(lambda: health(served) == (200, "ready"))


def test_a_package_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "fastapi.py").write_text("import no_such_package\n")
    command = [sys.executable, "-m", "craton.ml.serving.server", "--connection", "0"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    found = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False)
    assert found.returncode == 2
    assert found.stderr.startswith("error: the front end needs no_such_package, which is not installed; run: ")
