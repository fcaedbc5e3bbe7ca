"""Clients of the second family server: `second_server.py URL MODE COUNT` sends requests until it is killed."""

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

PATIENCE_SECONDS = 0.3


def post(url: str, path: str, timeout: float, **fields: Any) -> None:
    """Send one request and read its answer."""
    request = urllib.request.Request(
        url + path, json.dumps(fields).encode(), {"Content-Type": "application/json", "Connection": "close"}
    )
    with urllib.request.urlopen(request, timeout=timeout) as response:
        response.read()


def ask(url: str) -> None:
    post(url, "/v1/completions", 120, model=model, prompt=words(8), max_tokens=100, ignore_eos=True)


def hurry(url: str) -> None:
    """Give up after a moment, and send the same again at once."""
    post(url, "/v1/completions", PATIENCE_SECONDS, model=model, prompt=words(8), max_tokens=200, ignore_eos=True)


def keep_open(url: str) -> None:
    """Hold a connection without a request until the server closes it."""
    connection = socket.create_connection((urlsplit(url).hostname or "", urlsplit(url).port or 0))
    connection.recv(1)
    connection.close()


def words(count: int) -> str:
    return " ".join("".join(random.choices("abcdefgh", k=4)) for _ in range(count))


MODES: dict[str, Callable[[str], None]] = {"ask": ask, "hurry": hurry, "keep-open": keep_open}


def again_and_again(send: Callable[[str], None], url: str) -> None:
    while True:
        try:
            send(url)
        except OSError:
            time.sleep(0.01)


if __name__ == "__main__":
    with urllib.request.urlopen(f"{sys.argv[1]}/v1/models", timeout=30) as listed:
        model = json.load(listed)["data"][0]["id"]
    for _ in range(int(sys.argv[3])):
        threading.Thread(target=again_and_again, args=(MODES[sys.argv[2]], sys.argv[1])).start()
