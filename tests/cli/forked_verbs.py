"""Verbs in processes of their own that start at once: a process has imported everything, and forks for each.

`python forked_verbs.py` reads one JSON line per verb, {"arguments": [...], "root": ...}, and answers with one.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

SECONDS = 120.0  # that a verb may take, on a busy machine
MODULES = {"export": "craton.ml.export", "sample": "craton.ml.sample"}  # those that need torch


@dataclass(frozen=True)
class Said:
    code: int | None  # None: it was still there after SECONDS
    output: str
    max_bytes: int  # of memory


class ForkedVerbs:
    def __enter__(self) -> ForkedVerbs:
        command = [sys.executable, __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def __call__(self, root: Path, *arguments: str) -> Said:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"arguments": arguments, "root": str(root)}) + "\n")
        self._process.stdin.flush()
        return Said(**json.loads(self._process.stdout.readline()))


def _serve() -> None:
    from craton.cli import main
    from craton.ml import export, sample
    from craton.observability import web  # noqa: F401 - so that no child imports it

    for line in sys.stdin:
        asked = json.loads(line)
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            child = os.fork()
            if child == 0:
                os.setsid()
                os.environ["CRATON_RUNS"] = asked["root"]
                os.chdir(asked["root"])
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                verb, *rest = asked["arguments"]
                sys.argv = ["craton", verb, *rest]
                if verb in MODULES:
                    code = {"export": export, "sample": sample}[verb].main(rest)
                    sys.stdout.flush()
                    os._exit(code)
                try:
                    main()
                finally:
                    sys.stdout.flush()
            code, max_bytes = _waited_for(child)
            output.seek(0)
            print(json.dumps({"code": code, "output": output.read(), "max_bytes": max_bytes}), flush=True)


def _waited_for(child: int) -> tuple[int | None, int]:
    deadline = time.monotonic() + SECONDS
    while True:
        ended, status, used = os.wait4(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), used.ru_maxrss * 1024
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.wait4(child, 0)
            return None, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        time.sleep(0.005)


if __name__ == "__main__":
    _serve()
