"""A machine with GPUs as its tools show it: an `nvidia-smi` that lists them, and an MPS daemon that answers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

H200_MIB = 143771


def machine_with_h200s(folder: Path, monkeypatch: pytest.MonkeyPatch, count: int = 1) -> list[str]:
    """Put an `nvidia-smi` that lists `count` H200s first on the PATH; return their UUIDs."""
    uuids = [f"GPU-{number}f00-42" for number in range(count)]
    lines = "".join(f"{number}, {uuid}, NVIDIA H200, {H200_MIB}\n" for number, uuid in enumerate(uuids))
    details = "".join(
        f"<gpu id='00000000:0{number}:00.0'><uuid>{uuid}</uuid><product_name>NVIDIA H200</product_name></gpu>"
        for number, uuid in enumerate(uuids)
    )
    xml = f"<nvidia_smi_log><driver_version>580.1</driver_version>{details}</nvidia_smi_log>\n"
    _install(
        folder / "tools" / "nvidia-smi",
        f'case "$*" in\n*-x*) cat <<END\n{xml}END\n;;\n*nvlink*) ;;\n*) cat <<END\n{lines}END\n;;\nesac\n',
        monkeypatch,
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return uuids


def mps_daemon(folder: Path, monkeypatch: pytest.MonkeyPatch, status: int = 0) -> Path:
    """Put an `nvidia-cuda-mps-control` on the PATH that answers for the daemon of a pipe directory, or with `status`
    for one that has ended; return the directory."""
    pipes = folder / "mps"
    pipes.mkdir()
    question = f'read question; [ "$CUDA_MPS_PIPE_DIRECTORY" = {pipes} ] && echo 100.0 && exit {status}; exit 1\n'
    _install(folder / "tools" / "nvidia-cuda-mps-control", question, monkeypatch)
    return pipes


def _install(path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}", encoding="utf-8")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
