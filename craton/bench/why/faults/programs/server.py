"""Clients of the family server: `server.py URL MODE [NUMBER]` sends requests until it is killed."""

from __future__ import annotations

import json
import random
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_SECONDS = 600.0
RETRY_SECONDS = 0.5


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
    complete(url, prompt=[random.randrange(3, 500) for _ in range(60)], max_tokens=1800)


def grammars(url: str) -> None:
    """Ask for an answer by a schema that is new each time and slow to compile."""
    names = [f"field_{random.randrange(10**9)}" for _ in range(200)]
    text = {"type": "string", "pattern": f"^[a-z]{{1,{random.randrange(200, 400)}}}(x|y|z){{0,300}}$"}
    schema = {"type": "object", "properties": dict.fromkeys(names, text), "required": names}
    complete(url, prompt=words(8), max_tokens=200, guided_json=schema)


def unread_streams(url: str) -> None:
    """Open connections that never finish their request, and hold them."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=TIMEOUT_SECONDS) as connection:
        while True:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
            for _ in range(8):
                connection.sendall(b"a")
                time.sleep(1)
            return


def words(count: int) -> str:
    return " ".join("".join(random.choices("abcdefgh", k=4)) for _ in range(count))


MODES: dict[str, Callable[[str], None]] = {
    "overload": overload,
    "long-prompts": long_prompts,
    "long-answers": long_answers,
    "grammars": grammars,
    "unread": unread_streams,
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
