"""The decode kernels compile for a GPU that this machine need not have: Triton's interpreter accepts programs that its
compiler refuses. What they compute is tested in the interpreter, and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

COMPILING = Path(__file__).with_name("compiling.py")


pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.parametrize(
    ("names", "uses_tensor_cores"),
    [
        (("merge", "merge with groups"), False),
        pytest.param(("attend", "attend with groups"), True, marks=pytest.mark.slow),
    ],
)
def test_decode_kernels_compile_for_a_gpu(names: tuple[str, ...], uses_tensor_cores: bool) -> None:
    found = [line.rpartition(" ")[0] for line in compiled(*names)]
    assert found == [f"{name} {uses_tensor_cores}" for name in names]


@pytest.mark.slow
def test_sampling_of_kept_tokens_compiles_for_a_gpu_without_spilled_registers() -> None:
    names = ("choose kept bf16", "choose kept fp32")
    assert compiled(*names) == [f"{name} False 0" for name in names]


def compiled(*names: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(COMPILING), *names]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()
