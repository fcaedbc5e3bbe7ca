"""The process that starts members, seen from the manager: it takes one name at a time and answers how that went.

It is started with the first member and ends after a while without work, since it has imported the planner.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass

from craton.agent.processes import how_ended
from craton.orchestration.process_commands import manager_command
from craton.telemetry import RunDirectory

IDLE_SECONDS = 30.0


@dataclass(frozen=True)
class StartOutcome:
    """How the start of a member ended."""

    name: str
    refusal: str = ""  # why it cannot be started, however often it is tried
    crash: str = ""  # how the process that started it ended before it was done


class StarterProcess:
    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._process: subprocess.Popen[bytes] | None = None
        self._answer = b""
        self._idle_since = 0.0
        self.busy = ""  # the member that it starts now

    def start(self, name: str) -> None:
        """Begin to start a member; `poll` returns the outcome."""
        assert not self.busy, self.busy
        self.busy, self._answer = name, b""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                manager_command(self._run.path, "--starter"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )
            assert self._process.stdout is not None
            os.set_blocking(self._process.stdout.fileno(), False)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(name.encode() + b"\n")
        except BrokenPipeError:
            return  # `poll` sees that it has ended

    def poll(self) -> StartOutcome | None:
        """Return how the start ended; None while it goes on, or if there is none."""
        if self._process is None:
            return None
        code = self._process.poll()  # before reading: its last answer is read too
        assert self._process.stdout is not None
        self._answer += self._process.stdout.read() or b""
        if self.busy and self._answer.endswith(b"\n"):
            outcome = StartOutcome(self.busy, str(json.loads(self._answer)["refusal"]))
        elif self.busy and code is not None:
            outcome = StartOutcome(self.busy, crash=how_ended(code))
        else:
            if not self.busy and time.monotonic() - self._idle_since > IDLE_SECONDS:
                self.close()
            return None
        self.busy, self._answer, self._idle_since = "", b"", time.monotonic()
        return outcome

    def interrupt(self) -> None:
        """End the current start, unless its agents are about to start."""
        if self._process is not None and self.busy:
            self._process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """End the process; it has no work."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process = None
