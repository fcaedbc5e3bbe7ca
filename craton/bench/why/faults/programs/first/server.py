"""Clients of the family server: `server.py URL MODE [NUMBER]` sends requests until it is killed."""

from __future__ import annotations

import json
import random
import resource
import socket
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_SECONDS = 600.0
RETRY_SECONDS = 0.5
CONNECTIONS = 9000  # more than a server accepts


def complete(url: str, **fields: Any) -> None:
    """Send one request and read its answer."""
    body = json.dumps({"model": model_of(url), "ignore_eos": True, **fields}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
        response.read()


_models: dict[str, str] = {}


def model_of(url: str) -> str:
    if url not in _models:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as response:
            _models[url] = json.load(response)["data"][0]["id"]
    return _models[url]


def overload(url: str) -> None:
    complete(url, prompt=words(8), max_tokens=200)


def long_prompts(url: str) -> None:
    complete(url, prompt=[random.randrange(3, 500) for _ in range(1900)], max_tokens=8)


def long_answers(url: str) -> None:
    complete(url, prompt=[random.randrange(3, 500) for _ in range(300)], max_tokens=1600)


def grammars(url: str) -> None:
    """Ask for an answer by a schema that is new each time and slow to compile, of almost the maximum size."""
    names = [f"field_{random.randrange(10**9)}" for _ in range(2000)]
    text = {"type": "string", "pattern": f"^[a-z]{{1,{random.randrange(200, 400)}}}(x|y|z){{0,300}}$"}
    schema = {"type": "object", "properties": dict.fromkeys(names, text), "required": names}
    complete(url, prompt=words(8), max_tokens=200, guided_json=schema)


def slow_heads(url: str) -> None:
    """Hold as many connections as the server accepts: each sends the head of a request, and never its end."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * CONNECTIONS, 2 * CONNECTIONS))
    address = (urlsplit(url).hostname or "", urlsplit(url).port or 0)
    held: deque[socket.socket] = deque()
    while True:
        if len(held) >= CONNECTIONS:
            held.popleft().close()  # by now the server has given up on it
        try:
            connection = socket.create_connection(address, timeout=1)
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
            held.append(connection)
        except OSError:
            time.sleep(0.001)


def words(count: int) -> str:
    return " ".join("".join(random.choices("abcdefgh", k=4)) for _ in range(count))


MODES: dict[str, Callable[[str], None]] = {
    "overload": overload,
    "long-prompts": long_prompts,
    "long-answers": long_answers,
    "grammars": grammars,
    "slow-heads": slow_heads,
}


def again_and_again(send: Callable[[str], None], url: str) -> None:
    while True:
        try:
            send(url)
        except OSError:
            time.sleep(RETRY_SECONDS)


if __name__ == "__main__":
    for _ in range(int(sys.argv[3]) if len(sys.argv) > 3 else 32):
        threading.Thread(target=again_and_again, args=(MODES[sys.argv[2]], sys.argv[1])).start()
