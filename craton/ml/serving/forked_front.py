"""A front end that is forked from a rank instead of started: the rank's fork server has imported its modules.

It must be forked before the rank has threads or uses a GPU. It looks like a `subprocess.Popen` to its rank.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence

FRONT_MODULE = "craton.ml.serving.server.front"
LOOK_SECONDS = 0.01


class ForkedFront:
    """The process, as its parent sees it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    @classmethod
    def start(cls, arguments: Sequence[str], environment: Mapping[str, str], other_end: socket.socket) -> ForkedFront:
        """Fork a front end. `other_end` of its connection is the engine's: closed in the front end."""
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return cls(pid)
        code = 1
        try:
            gc.freeze()  # what the rank has opened is not the front end's to close
            other_end.close()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.environ.clear()
            os.environ.update(environment)
            code = importlib.import_module(FRONT_MODULE).main(list(arguments))
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:  # noqa: BLE001 -- printed, and turned into the exit code
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("the front end", timeout or 0.0)
            time.sleep(LOOK_SECONDS)
        return code

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)
