"""How much hostile requests slow down other clients of a server: `python benchmarks/hostile_requests.py`.

Starts a real server of a tiny model on this machine, keeps a steady load of streams on it, and polls /health: first
without an attack, then during each attack, which a separate process sends. Prints the p99 gap between tokens and the
p99 latency of /health during the attack, and their growth. The limit is 100 ms for each.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

MAX_GROWTH_SECONDS = 0.1
NUM_STREAMS = 4
MAX_LENGTH = 512


@dataclass
class Load:
    """Streams and health checks against one server, and their measurements."""

    port: int
    gaps: list[float] = field(default_factory=list)
    healths: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    is_over: bool = False

    def run(self, seconds: float, attack: Callable[[], None]) -> None:
        threads = [threading.Thread(target=self._stream, args=(number,)) for number in range(NUM_STREAMS)]
        threads.append(threading.Thread(target=self._check_health))
        for thread in threads:
            thread.start()
        time.sleep(1.0)  # the streams are under way
        self.gaps.clear()
        self.healths.clear()
        began = time.monotonic()
        attack()
        time.sleep(max(seconds - (time.monotonic() - began), 0.0))
        self.is_over = True
        for thread in threads:
            thread.join()

    def _stream(self, number: int) -> None:
        body = {"prompt": [5 + number, 6, 7], "max_tokens": MAX_LENGTH - 8, "ignore_eos": True, "stream": True}
        while not self.is_over:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
            try:
                connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
                answer = connection.getresponse()
                if answer.status != 200:
                    self.errors.append(f"{answer.status} {answer.read()[:200]!r}")
                    return
                last = None
                while not self.is_over and (line := answer.readline()):
                    if line.startswith(b"data:"):
                        now = time.perf_counter()
                        if last is not None:
                            self.gaps.append(now - last)
                        last = now
            except OSError as error:
                self.errors.append(f"stream: {error}")
                return
            finally:
                connection.close()

    def _check_health(self) -> None:
        while not self.is_over:
            began = time.perf_counter()
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
                connection.request("GET", "/health")
                if (status := connection.getresponse().status) != 200:
                    self.errors.append(f"/health {status}")
                connection.close()
            except OSError as error:
                self.errors.append(f"/health: {error}")
            self.healths.append(time.perf_counter() - began)
            time.sleep(0.02)


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


Attack = Callable[[], object]


def post(port: int, path: str, data: bytes, seconds: float = 60.0) -> str:
    """Return the status and the beginning of the response."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    try:
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return f"{answer.status} {answer.read()[:160].decode(errors='replace')}"
    except OSError as error:
        return f"closed ({type(error).__name__})"
    finally:
        connection.close()


def posts(port: int, path: str, bodies: list[object]) -> Attack:
    """Return an attack that sends all bodies in parallel, encoded in advance."""
    encoded = [body if isinstance(body, bytes) else json.dumps(body).encode() for body in bodies]

    def attack() -> None:
        answers: list[str] = []
        threads = [
            threading.Thread(target=lambda data=data: answers.append(post(port, path, data))) for data in encoded
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print("  " + "\n  ".join(sorted(set(answers))), flush=True)

    return attack


def constrained(port: int, bodies: list[dict[str, object]]) -> Attack:
    return posts(port, "/v1/completions", [{"prompt": [5, 6], "max_tokens": 32, **body} for body in bodies])


def slow_grammars(port: int) -> Attack:
    """Grammars whose compile time grows with the square of the number of properties."""
    schemas = [{f"p{number}_{place}": {"type": "string"} for place in range(7000)} for number in range(6)]
    return constrained(port, [{"guided_json": {"type": "object", "properties": each}} for each in schemas])


def slow_masks(port: int) -> Attack:
    regexes = ["a" * 200_000, r"(\p{L}{1,50}\s?){1,500}", "((a{1,1000}){1,1000}){1,1000}", "(a|b|c){100000}"]
    return constrained(port, [{"guided_regex": regex} for regex in regexes])


def half_requests(port: int) -> Attack:
    """Send 300 incomplete requests; the server must close them within their deadline."""

    def attack() -> None:
        halves = []
        for _ in range(300):
            half = socket.create_connection(("127.0.0.1", port), timeout=30)
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le")
            halves.append(half)
        began = time.monotonic()
        while (num_open := sum(map(_is_open, halves))) and time.monotonic() - began < 30:
            time.sleep(0.5)
        print(f"  {num_open} of 300 open after {time.monotonic() - began:.0f} s", flush=True)

    return attack


def _is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
HOSTILE: dict[str, Callable[[int], Attack]] = {
    "nothing": lambda port: lambda: None,
    "ten regexes of 10 MB": lambda port: constrained(port, [{"guided_regex": "a" * 10_000_000}] * 10),
    "two prompts of 4 MB": lambda port: posts(port, COMPLETIONS, [{"prompt": "hello world " * 350_000}] * 2),
    "two prompts of 1.9 MB": lambda port: posts(port, COMPLETIONS, [{"prompt": "hello world " * 158_000}] * 2),
    "20 texts of 6 kB to tokenize": lambda port: posts(port, "/tokenize", [{"prompt": "he wo " * 1000}] * 20),
    "six slow grammars": slow_grammars,
    "four grammars with slow masks": slow_masks,
    "three prompts of 1M tokens": lambda port: posts(
        port, COMPLETIONS, [b'{"prompt":[' + b"1," * 1_000_000 + b"1]}"] * 3
    ),
    "three prompts of 99k tokens": lambda port: posts(
        port, COMPLETIONS, [b'{"prompt":[' + b"1," * 99_000 + b"1]}"] * 3
    ),
    "three prompts of 99k wrong tokens": lambda port: posts(
        port, COMPLETIONS, [b'{"prompt":[' + b"-1," * 99_000 + b"1]}"] * 3
    ),
    "three chats of 8,000 messages": lambda port: posts(
        port, CHATS, [{"messages": [{"role": "user", "content": "a"}] * 8000}] * 3
    ),
    "JSON nested 200,000 deep": lambda port: posts(
        port, COMPLETIONS, [b'{"prompt":' + b"[" * 200_000 + b"]" * 200_000 + b"}"] * 3
    ),
    "300 half-sent requests": half_requests,
}


@contextlib.contextmanager
def attacker(name: str, port: int) -> Iterator[Callable[[], None]]:
    """Start a process with its requests ready; yield a function that runs the attack and waits for its end."""
    command = [sys.executable, __file__, "--attack", name, "--port", str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        stdin, stdout = process.stdin, process.stdout

        def attack() -> None:
            stdin.write("go\n")
            stdin.close()
            for line in stdout:
                print(f"{line.rstrip()[:180]}")

        yield attack


@contextlib.contextmanager
def serving(root: Path) -> Iterator[int]:
    """Start a server of a tiny model with a tokenizer; yield its port."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from craton.agent.processes import free_port
    from craton.job import parse_job
    from craton.ml.data import load_tokenizer
    from craton.ml.data.chat import ensure_template
    from craton.ml.data.tokenizer import train_bpe
    from craton.orchestration import living_agents
    from craton.orchestration.draft import draft_run
    from craton.orchestration.start import kill_run, start_run

    folder = root / "tiny"
    folder.mkdir()
    train_bpe(["The quick brown fox says hello to the world. What is 2 + 2? It is 4.\n"] * 4, 300, folder)
    ensure_template(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=load_tokenizer(folder).get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    port = free_port()
    job = parse_job(
        f"name: hostile\nkind: serve\nmodel: {folder}\ncluster: local\n"
        f"serve: {{port: {port}, precision: fp32, max_length: {MAX_LENGTH}}}\n"
    )
    run = start_run(draft_run(job, root / "hostile", port=free_port()), root)
    try:
        deadline = time.monotonic() + 180
        while not _is_ready(port):
            if run.has("FATAL") or time.monotonic() > deadline:
                raise SystemExit(f"the server did not start; see {run.path}/logs")
            time.sleep(0.2)
        yield port
    finally:
        if living_agents(run):
            kill_run(run)


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def measure(port: int, name: str, seconds: float) -> tuple[float, float]:
    """Return the p99 gap between tokens and the p99 latency of /health during an attack."""
    load = Load(port)
    with attacker(name, port) as attack:
        load.run(seconds, attack)
    for error in load.errors[:3]:
        print(f"  ! {error}")
    return quantile(load.gaps, 0.99), quantile(load.healths, 0.99)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="minimum duration of each load")
    parser.add_argument("--only", default="", help="run only the attacks whose name contains this")
    parser.add_argument("--attack", choices=HOSTILE, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        attack = HOSTILE[options.attack](options.port)
        print("ready", flush=True)
        sys.stdin.readline()
        attack()
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as port:
        constrained(port, [{"guided_regex": "a+"}])()  # the process that checks grammars has started
        print(f"{f'beside {NUM_STREAMS} streams':36}{'p99 gap':>12}{'growth':>10}{'p99 /health':>13}{'growth':>10}")
        for name in HOSTILE:
            if options.only not in name:
                continue
            gap_before, health_before = measure(port, "nothing", options.seconds)
            gap, health = measure(port, name, options.seconds)
            worst = max(worst, gap - gap_before, health - health_before)
            print(
                f"{name:36}{gap * 1e3:9.1f} ms{(gap - gap_before) * 1e3:+10.1f}{health * 1e3:10.1f} ms"
                f"{(health - health_before) * 1e3:+10.1f}",
                flush=True,
            )
    print(f"largest growth {worst * 1e3:.1f} ms; at most {MAX_GROWTH_SECONDS * 1e3:.0f} ms is allowed")
    return int(worst > MAX_GROWTH_SECONDS)


if __name__ == "__main__":
    raise SystemExit(main())
