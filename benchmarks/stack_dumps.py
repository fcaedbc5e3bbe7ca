"""Stack dumps of a process with busy Python threads: by a signal handler, or by a thread with the interpreter lock.

    python benchmarks/stack_dumps.py [--tries 4] [--seconds 6]

For each way, `--tries` processes with two busy threads dump their stacks about every millisecond for `--seconds`. The
result is how many of them died, and after how many dumps.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack

from craton.telemetry.rank import STACK_SIGNAL, make_stack_file

PERIOD_SECONDS = 0.001
# One thread calls itself, one starts short threads; the main thread dumps all stacks at every line of standard input.
PROGRAM = """
import os, sys, threading
from craton.telemetry.rank import answer_stack_requests, dump_stacks

def deep(depth):
    return depth and deep(depth - 1)

def recurse():
    while True:
        deep(50)

def start_threads():
    while True:
        thread = threading.Thread(target=deep, args=(5,))
        thread.start()
        thread.join()

assert answer_stack_requests()
for work in (recurse, start_threads):
    threading.Thread(target=work, daemon=True).start()
print("ready", flush=True)
for _ in sys.stdin:
    dump_stacks()
    os.ftruncate(int(os.environ["CRATON_STACKS"]), 0)
"""


def dumps_until_death(by_signal: bool, seconds: float) -> tuple[int, int | None]:
    """Return the number of dumps, and the signal that ended the process; None if it lives."""
    descriptor = make_stack_file()
    with ExitStack() as stack:
        stack.callback(os.close, descriptor)
        errors = stack.enter_context(tempfile.TemporaryFile())
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", PROGRAM],
            env={**os.environ, "CRATON_STACKS": str(descriptor)},
            pass_fds=(descriptor,),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        stack.callback(process.kill)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        count, deadline = 0, time.monotonic() + seconds
        while time.monotonic() < deadline and process.poll() is None:
            if by_signal:
                os.ftruncate(descriptor, 0)
                os.kill(process.pid, STACK_SIGNAL)
            else:
                process.stdin.write(b"\n")
                process.stdin.flush()
            count += 1
            time.sleep(PERIOD_SECONDS)
        return count, -process.returncode if process.poll() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=6.0)
    wanted = parser.parse_args()
    for name, by_signal in (("signal", True), ("thread", False)):
        results = [dumps_until_death(by_signal, wanted.seconds) for _ in range(wanted.tries)]
        died = [(count, signal.Signals(number).name) for count, number in results if number is not None]
        words = ", ".join(f"{how} after {count:,} dumps" for count, how in died) or "none died"
        print(f"{name}: {len(died)} of {wanted.tries} died: {words}; {sum(count for count, _ in results):,} dumps")


if __name__ == "__main__":
    main()
