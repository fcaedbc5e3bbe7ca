"""The source of the probes: this machine, or a node image in a folder. Nothing here writes or raises: missing data is
empty.

A node image is a tree with the paths of the node (`sys/...`, `proc/...`, `opt/...`) and `commands/NAME.txt` with the
output of its tools; a first line `exit N` means that the tool failed. On this machine the tools run instead, each once
with a time limit and all in parallel, so that a slow driver delays a pre-flight once and not six times.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import distributions
from pathlib import Path

COMMANDS: dict[str, list[str]] = {
    "nvidia-smi": ["nvidia-smi", "-q", "-x"],
    "nvlink": ["nvidia-smi", "nvlink", "--status"],
    "fi_info": ["fi_info", "-p", "efa"],
    "lnet": ["lnetctl", "net", "show"],
    "lctl": ["lctl", "get_param", "-n", "version"],
    "ldconfig": ["ldconfig", "-p"],
    "dmesg": ["dmesg"],
    "chronyc": ["chronyc", "tracking"],
    "timedatectl": ["timedatectl", "show"],
}
PACKAGES = "packages"  # installed Python packages, as lines NAME==VERSION; from Python itself
ENVIRONMENT = "environment"  # lines NAME=VALUE
MORE_PLACES = ("/usr/sbin", "/sbin", "/opt/amazon/efa/bin")  # with tools that a user's PATH may lack
ANSWER_SECONDS = 20.0  # a driver without persistence mode takes seconds to start
READ_BYTES = 2**16
COUNTER_BYTES = 64  # enough for any file with one number
TIMED_OUT, MISSING = 124, 127  # exit codes of timeout(1) and the shell
_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True)
class ToolOutput:
    """Output and exit code of a tool."""

    text: str = ""
    code: int = MISSING

    @property
    def is_there(self) -> bool:
        return self.code != MISSING

    @property
    def worked(self) -> bool:
        return self.code == 0

    @property
    def timed_out(self) -> bool:
        return self.code == TIMED_OUT

    @property
    def first_line(self) -> str:
        return next((line.strip() for line in self.text.splitlines() if line.strip()), "")


class NodeRoot:
    """The files of a node and the output of its tools."""

    def __init__(
        self, path: Path | str = "/", answer_seconds: float = ANSWER_SECONDS, *, files_only: bool = False
    ) -> None:
        self.path = Path(path)
        self._prefix = str(self.path).rstrip("/")
        self.answer_seconds = answer_seconds
        self.files_only = files_only  # run no tools and search no packages: takes milliseconds

    @property
    def is_live(self) -> bool:
        return self.path == Path("/")

    @cached_property
    def is_recorded(self) -> bool:
        """Whether this is an image, not the mounted root of a live node, as a container has it."""
        return not self.is_live and self.exists("commands")

    def at(self, path: str) -> Path:
        return self.path / path.lstrip("/")

    def read(self, path: str) -> str:
        """Return the text of a file, stripped."""
        return self.bytes_of(path).decode("utf-8", "replace").strip()

    def bytes_of(self, path: str) -> bytes:
        """Return the bytes of a file, by system calls only: an exporter reads a thousand counters every few seconds."""
        try:
            descriptor = os.open(f"{self._prefix}/{path.lstrip('/')}", os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, ValueError):
            return b""
        try:
            # One read returns a whole counter file; proc(5) returns longer texts in pieces.
            pieces = [os.read(descriptor, READ_BYTES)]
            if len(pieces[0]) > COUNTER_BYTES:
                while piece := os.read(descriptor, READ_BYTES):
                    pieces.append(piece)
            return b"".join(pieces)
        except OSError:
            return b""
        finally:
            os.close(descriptor)

    def number(self, path: str) -> int | None:
        text = self.read(path)
        return int(text) if re.fullmatch(r"-?\d+", text) else None

    def names(self, folder: str) -> list[str]:
        """Return the entries of a folder in natural order: mlx5_2 before mlx5_10."""
        try:
            return sorted((entry.name for entry in self.at(folder).iterdir()), key=_in_order)
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        return os.path.lexists(self.at(path))

    def link(self, path: str) -> str:
        """Return the base name of a link's target: in sysfs, a device's driver."""
        return os.path.basename(self.target(path))

    def target(self, path: str) -> str:
        """Return the target of a link, unresolved."""
        try:
            return os.readlink(self.at(path))
        except OSError:
            return ""

    def ask(self, name: str) -> ToolOutput:
        """Return the output of one of COMMANDS."""
        return self._answers[name]

    @cached_property
    def environment(self) -> dict[str, str]:
        """The environment variables of a job on this node."""
        if self.is_live:
            return dict(os.environ)
        return dict(_pairs(self.read(f"commands/{ENVIRONMENT}.txt").splitlines(), "="))

    @cached_property
    def packages(self) -> dict[str, str]:
        """Python packages and their versions, names in lowercase with `-`."""
        if self.files_only:
            return {}
        if self.is_live:
            pairs = (
                (distribution.metadata["Name"], distribution.version)
                for distribution in distributions()
                if distribution.metadata["Name"]
            )
            return {_package(name): version for name, version in pairs}
        lines = self.read(f"commands/{PACKAGES}.txt").splitlines()
        return {_package(name): version for name, version in _pairs(lines, "==")}

    @cached_property
    def _answers(self) -> Mapping[str, ToolOutput]:
        if self.files_only:
            return dict.fromkeys(COMMANDS, ToolOutput())
        if not self.is_live:
            return {name: self._recorded(name) for name in COMMANDS}
        with ThreadPoolExecutor(len(COMMANDS)) as pool:
            return dict(zip(COMMANDS, pool.map(self._run, COMMANDS.values()), strict=True))

    def _recorded(self, name: str) -> ToolOutput:
        text = self.read(f"commands/{name}.txt")
        if not text:
            return ToolOutput()
        first, _, rest = text.partition("\n")
        failed = re.fullmatch(r"exit (\d+)", first)
        return ToolOutput(rest, int(failed[1])) if failed else ToolOutput(text, 0)

    def _run(self, command: list[str]) -> ToolOutput:
        program = shutil.which(command[0], path=os.pathsep.join([os.environ.get("PATH", ""), *MORE_PLACES]))
        if program is None:
            return ToolOutput()
        try:
            ended = subprocess.run(
                [program, *command[1:]],
                capture_output=True,
                stdin=subprocess.DEVNULL,
                timeout=self.answer_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return ToolOutput("", TIMED_OUT)
        except OSError as error:
            return ToolOutput(str(error), MISSING)
        output = ended.stdout if ended.returncode == 0 else ended.stdout + ended.stderr
        return ToolOutput(output.decode(errors="replace").strip(), ended.returncode)


def _pairs(lines: Iterable[str], sign: str) -> Iterable[tuple[str, str]]:
    for line in lines:
        name, separator, value = line.strip().partition(sign)
        if separator:
            yield name, value


def _package(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _in_order(name: str) -> list[int | str]:
    parts = _DIGITS.split(name)
    return [int(part) if position % 2 else part for position, part in enumerate(parts)]
