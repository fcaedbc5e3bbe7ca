"""Runs a model's program with its tests. This file is executed by path inside the sandbox of one sample, and imports
nothing of Craton.

Tests are Python statements, executed after the program in the same interpreter; or inputs, for each of which the
program runs once and its output is returned. The expected outputs never enter the sandbox.
"""

import json
import os
import struct
import subprocess
import sys
from typing import Any

OUTPUT_BYTES = 1 << 20


def main() -> None:
    channel = os.dup(0)
    os.set_inheritable(channel, False)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    send(channel, {"started": True})
    request = receive(channel)
    try:
        reply = run_inputs(request) if "inputs" in request else run_tests(request)
    except MemoryError:
        reply = {"error": "the program needs more memory than verify.memory"}
    send(channel, {**reply, "nonce": request["nonce"]})
    os._exit(0)


def run_tests(request: dict[str, Any]) -> dict[str, Any]:
    """Return which tests pass. A program that ends the interpreter fails them all."""
    names = {"__name__": "__program__", "__builtins__": __builtins__}
    passed = [False] * len(request["tests"])
    if not completes(request["program"], "program.py", names):
        return {"passed": passed}
    for index, test in enumerate(request["tests"]):
        passed[index] = completes(test, "test.py", names)
    return {"passed": passed}


def completes(source: str, file: str, names: dict[str, Any]) -> bool:
    try:
        exec(compile(source, file, "exec"), names)
    except MemoryError:
        raise
    except BaseException:  # noqa: BLE001 (also SystemExit: an early end is no success)
        return False
    return True


def run_inputs(request: dict[str, Any]) -> dict[str, Any]:
    """Return the output for each input; None for a program that fails or prints too much."""
    with open("program.py", "w") as file:
        file.write(request["program"])
    outputs = []
    for text in request["inputs"]:
        process = subprocess.Popen(
            [sys.executable, "-I", "program.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        outputs.append(output_of(process, text))
    return {"outputs": outputs}


def output_of(process: subprocess.Popen[bytes], text: str) -> str | None:
    assert process.stdin is not None
    assert process.stdout is not None
    if os.fork() == 0:  # a second process writes, so that neither pipe can fill up and block both
        process.stdout.close()
        try:
            process.stdin.write(text.encode())
            process.stdin.close()
        except OSError:
            pass
        os._exit(0)
    process.stdin.close()
    found = process.stdout.read(OUTPUT_BYTES + 1)
    if len(found) > OUTPUT_BYTES:
        process.kill()
    process.stdout.close()
    if process.wait() != 0 or len(found) > OUTPUT_BYTES:
        return None
    return found.decode(errors="replace")


def send(channel: int, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    data = struct.pack("!I", len(data)) + data
    while data:
        data = data[os.write(channel, data) :]


def receive(channel: int) -> dict[str, Any]:
    request: dict[str, Any] = json.loads(read(channel, struct.unpack("!I", read(channel, 4))[0]))
    return request


def read(channel: int, length: int) -> bytes:
    found = b""
    while len(found) < length:
        data = os.read(channel, length - len(found))
        if not data:
            os._exit(1)
        found += data
    return found


if __name__ == "__main__":
    main()
