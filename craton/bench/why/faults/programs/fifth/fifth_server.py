"""Clients of the fifth family server: `fifth_server.py URL MODE COUNT [KEY]` sends requests until it is killed.

MODE `ask` sends plain requests, `scrape` reads /metrics without a pause, `update` lets the server wait for new weights
from a trainer that never comes; KEY is the file with the admin key.
"""

from __future__ import annotations

import json
import random
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 600.0
PAUSE_SECONDS = 0.2


def send(url: str, body: dict[str, Any], **headers: str) -> None:
    """Send one request and read its answer."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
        response.read()


def ask(url: str) -> None:
    prompt = " ".join(random.choices(("ab", "cd", "ef", "gh"), k=8))
    send(f"{url}/v1/completions", {"model": model, "prompt": prompt, "max_tokens": 100, "ignore_eos": True})


def scrape(url: str) -> None:
    with urllib.request.urlopen(f"{url}/metrics", timeout=TIMEOUT_SECONDS) as response:
        response.read()


def update(url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    key = Path(sys.argv[4]).read_text().strip()
    send(f"{url}/update_weights", {"address": f"127.0.0.1:{port}"}, Authorization=f"Bearer {key}")


MODES: dict[str, Callable[[str], None]] = {"ask": ask, "scrape": scrape, "update": update}


def again_and_again(request: Callable[[str], None], url: str) -> None:
    while True:
        try:
            request(url)
        except OSError:
            time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    with urllib.request.urlopen(f"{sys.argv[1]}/v1/models", timeout=60) as listed:
        model = json.load(listed)["data"][0]["id"]
    for _ in range(int(sys.argv[3])):
        threading.Thread(target=again_and_again, args=(MODES[sys.argv[2]], sys.argv[1])).start()
