"""Files that are written for users have the mode that the umask gives, not that of a temporary file."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from craton.ml.models import save_tensors
from craton.ml.training.build import run_identity
from craton.telemetry import RunDirectory


@pytest.fixture(params=[0o022, 0o027])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_weights_are_as_readable_as_other_files(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "model.safetensors"
    for _ in range(2):  # anew, and over a file that is there
        save_tensors({"weight": torch.ones(3)}, path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_the_identity_of_a_run_is_as_readable_as_other_files(tmp_path: Path, umask: int) -> None:
    run = RunDirectory(tmp_path)
    assert run_identity(run) == run_identity(run)
    folder = tmp_path / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["OWNER"], "nothing else is left"
    assert stat.S_IMODE((folder / "OWNER").stat().st_mode) == 0o666 & ~umask
