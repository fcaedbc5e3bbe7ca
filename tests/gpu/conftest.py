"""Ranks that share the one GPU of a machine and talk over NCCL, and the kernel server (MPS) that lets them overlap."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # as in tests/ml: these modules import Triton first, although they are skipped

sys.path.insert(0, str(Path(__file__).parents[1] / "ml"))  # the gang
sys.path.insert(0, str(Path(__file__).parents[1] / "ml" / "training"))  # trainings small enough for a test
sys.path.insert(0, str(Path(__file__).parents[1] / "recovery"))  # runs that are broken on purpose

from gang import Gang

LARGEST_WORLD = 8
_lines: list[str] = []  # of the summary


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _lines:
        terminalreporter.section("measured")
        for line in _lines:
            terminalreporter.write_line(line)


@pytest.fixture
def summary() -> Callable[[str], None]:
    """Adds a line to what is printed at the end."""
    return _lines.append


@pytest.fixture(scope="session")
def mps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[bool]:
    """Whether kernels of different ranks overlap: MPS is started where it is installed. Without it ranks take turns."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        yield False
        return
    folder = tmp_path_factory.mktemp("mps")
    names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
    os.environ.update(dict.fromkeys(names, str(folder)))
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
    yield True
    subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, check=False)
    for name in names:
        del os.environ[name]


@pytest.fixture(scope="session")
def nccl_gang(mps: bool) -> Iterator[Gang]:
    """Eight live ranks on one GPU; they start at the first use."""
    ranks = Gang(LARGEST_WORLD, is_on_gpu=True)
    yield ranks
    ranks.close()
