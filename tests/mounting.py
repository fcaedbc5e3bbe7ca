"""File systems that become read-only under running processes."""

from __future__ import annotations

import subprocess
from pathlib import Path

from waiting import wait_until


def make_read_only(folder: Path, option: str = "remount,ro") -> None:
    """Make a file system read-only. The kernel refuses that while a process has a file of it open for writing, so it is
    tried until it succeeds."""
    _remount(folder, option)


def make_writable(folder: Path) -> None:
    _remount(folder, "remount,rw")


def bind_read_only(folder: Path) -> None:
    """Mount a folder over itself and make it read-only; `umount` it afterwards."""
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    make_read_only(folder, "remount,bind,ro")


def _remount(folder: Path, option: str) -> None:
    command = ["mount", "-o", option, str(folder)]
    wait_until(lambda: subprocess.run(command, capture_output=True, check=False).returncode == 0, f"mount -o {option}")
