"""The verbs of runs as a user has them, on jobs of stand-in ranks that count steps (tests/orchestration/rank.py)."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE_SECONDS, wait_until

from craton.cli import main
from craton.telemetry import RunDirectory, summarize

RANK = Path(__file__).parents[1] / "orchestration" / "rank.py"


@dataclass(frozen=True)
class Result:
    returncode: int
    stdout: str
    stderr: str


class Verbs:
    """`verbs("run", ...)` does what `craton run ...` does in a shell, in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], folder: Path) -> None:
        self.monkeypatch, self.capfd = monkeypatch, capfd
        self.folder = folder
        self.root = folder / "runs"
        monkeypatch.setenv("CRATON_RUNS", str(self.root))
        monkeypatch.chdir(folder)

    def __call__(self, *arguments: object) -> Result:
        self.monkeypatch.setattr(sys, "argv", ["craton", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        output = self.capfd.readouterr()
        return Result(int(caught.value.code or 0), output.out, output.err)

    def json(self, *arguments: object, code: int = 0) -> Any:
        result = self(*arguments, "--json")
        assert result.returncode == code, result.stderr
        assert result.stdout.count("\n") == 1
        return json.loads(result.stdout)

    def job(self, nodes: int = 2, **environment: object) -> Path:
        """A job file of ranks that count steps."""
        env = ", ".join(f"{key}: '{value}'" for key, value in environment.items())
        path = self.folder / "count.yaml"
        path.write_text(
            f"kind: command\ncommand: [{sys.executable}, {RANK}]\ncluster: local x {nodes}\nrun: {{env: {{{env}}}}}\n"
        )
        return path

    def run(self, name: str = "count") -> RunDirectory:
        return RunDirectory(self.root / name)

    def wait_for_step(self, step: int, name: str = "count") -> None:
        wait_until(lambda: summarize(self.run(name)).step >= step)


def in_a_terminal(
    verbs: Verbs, arguments: list[str], when: str = "", send: bytes = b"", program: tuple[str, ...] = ("-m", "craton")
) -> tuple[int, str]:
    """Runs the command (or another program of Python's) as the foreground of a terminal; types `send` when `when` is
    on the screen."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(verbs.folder)
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
        os.execve(sys.executable, [sys.executable, *program, *arguments], environment)
    screen, sent = b"", False
    signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.alarm(int(PATIENCE_SECONDS))
    try:
        while True:
            try:
                part = os.read(terminal, 65536)
            except OSError:  # how Linux says that the other side is gone
                break
            if not part:
                break
            screen += part
            if send and not sent and when.encode() in screen:
                os.write(terminal, send)
                sent = True
    finally:
        signal.alarm(0)
    _, status = os.waitpid(child, 0)
    os.close(terminal)
    return os.waitstatus_to_exitcode(status), re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.decode(errors="replace"))
