"""Clients of the fourth family server: `fourth_server.py URL MODE COUNT` sends requests until it is killed.

MODE `ask` sends plain requests, `schema` asks for answers by a JSON schema that is new each time and quick to compile.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any

TIMEOUT_SECONDS = 300.0


def complete(url: str, **fields: Any) -> None:
    """Send one request and read its answer."""
    body = {"model": model, "prompt": " ".join(random.choices(("ab", "cd", "ef", "gh"), k=8)), **fields}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
        response.read()


def ask(url: str) -> None:
    complete(url, max_tokens=60, ignore_eos=True)


def schema(url: str) -> None:
    name = f"field_{random.randrange(10**9)}"
    complete(url, max_tokens=40, guided_json={"type": "object", "properties": {name: {"type": "integer"}}})


MODES: dict[str, Callable[[str], None]] = {"ask": ask, "schema": schema}


def again_and_again(send: Callable[[str], None], url: str) -> None:
    while True:
        try:
            send(url)
        except OSError:
            time.sleep(0.2)


if __name__ == "__main__":
    with urllib.request.urlopen(f"{sys.argv[1]}/v1/models", timeout=60) as listed:
        model = json.load(listed)["data"][0]["id"]
    for _ in range(int(sys.argv[3])):
        threading.Thread(target=again_and_again, args=(MODES[sys.argv[2]], sys.argv[1])).start()
