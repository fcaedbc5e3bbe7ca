"""Runs a model's program with its tests. This file is executed by path inside the sandbox of one sample, and imports
nothing of Craton.

Tests are Python statements, executed after the program in the same interpreter; or inputs, for each of which the
program runs once and its output is returned. The expected outputs never enter the sandbox.

A program may try to pass without solving its task. The tests, and the number without which no reply counts, are sent
once the program has been executed. What runs the tests was bound before it, in local names, so that a replaced builtin
has no effect. This stops simple cheats only: the program shares the interpreter, and can change what a name means.
"""

import builtins
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
    send(channel, b'{"started": true}')
    try:
        request = json.loads(receive(channel))
        program, inputs = request["program"], request["inputs"]
    except Exception as error:  # noqa: BLE001 (before the program runs it is not its fault: no verdict, instead of a 0)
        send(channel, json.dumps({"error": f"the program could not be read: {error!r}"}).encode())
        os._exit(0)
    if inputs is None:
        run_tests(channel, program)
    else:
        run_inputs(channel, program, inputs)
    os._exit(0)


def run_tests(
    channel: int,
    program: str,
    execute: Any = exec,
    compiled: Any = compile,
    tell: Any = None,
    hear: Any = None,
    parsed: Any = json.loads,
    stop_tracing: Any = (sys.settrace, sys.setprofile),
) -> None:
    """Reply with the number if all tests pass. A program that ends the interpreter gets no further."""
    tell, hear = tell or send, hear or receive
    pristine = dict(vars(builtins))
    exhausted, anything = MemoryError, BaseException
    names = {"__name__": "__program__", "__builtins__": builtins}
    sys.modules["__main__"] = type(sys)("__main__")  # so that a program cannot replace these functions
    try:
        execute(compiled(program, "program.py", "exec"), names)
    except exhausted:
        tell(channel, b'{"error": "the program needs more memory than verify.memory"}')
        return
    except anything:  # also SystemExit: an early end is no success
        return
    for stop in stop_tracing:
        stop(None)
    vars(builtins).update(pristine)
    names["__builtins__"] = pristine
    tell(channel, b'{"loaded": true}')
    request = parsed(hear(channel))
    try:
        for test in request["tests"]:
            execute(compiled(test, "test.py", "exec"), names)
    except exhausted:
        tell(channel, b'{"error": "the program needs more memory than verify.memory"}')
    except anything:
        return
    else:
        tell(channel, b'{"passed": "' + request["nonce"].encode() + b'"}')


def run_inputs(channel: int, program: str, inputs: list[str]) -> None:
    """Reply with the output for each input; None for a program that fails or prints too much."""
    with open("program.py", "w") as file:
        file.write(program)
    outputs = []
    for text in inputs:
        process = subprocess.Popen(
            [sys.executable, "-I", "program.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        outputs.append(output_of(process, text))
    send(channel, json.dumps({"outputs": outputs}).encode())


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
    return str(found, errors="replace")


def send(channel: int, message: bytes, write: Any = os.write, pack: Any = struct.pack, size: Any = len) -> None:
    data = pack("!I", size(message)) + message
    while data:
        data = data[write(channel, data) :]


def receive(
    channel: int, read: Any = os.read, unpack: Any = struct.unpack, size: Any = len, leave: Any = os._exit
) -> bytes:
    wanted, found = 4, b""
    is_header = True
    while size(found) < wanted:
        data = read(channel, wanted - size(found))
        if not data:
            leave(1)
        found += data
        if is_header and size(found) == wanted:
            wanted, found, is_header = unpack("!I", found)[0], b"", False
    return found


if __name__ == "__main__":
    main()
