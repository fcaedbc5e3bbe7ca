"""The kernels of serving compile for a GPU that this machine need not have: Triton's interpreter accepts programs that
its compiler refuses. What they compute is tested in the interpreter, and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

COMPILING = Path(__file__).with_name("compiling.py")
ROW_LAYERS = ("qkv", "gated", "down", "gated of 7,168")


NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@NEEDS_TRITON
@pytest.mark.parametrize(
    ("names", "uses_tensor_cores"),
    [
        (("merge", "merge with groups", "store latents"), False),
        pytest.param(("attend", "attend with groups"), True, marks=pytest.mark.slow),
        *(
            pytest.param(tuple(f"one row in {kind}, {layer}" for layer in ROW_LAYERS), False, marks=pytest.mark.slow)
            for kind in ("bf16", "fp32", "fp8")
        ),
        pytest.param(
            ("prefill", "prefill with blocks that tiles do not end with", "prefill with a window", "prefill in fp8"),
            True,
            marks=pytest.mark.slow,
        ),
        pytest.param(("choose kept bf16", "choose kept fp32"), False, marks=pytest.mark.slow),
        pytest.param(("merge latents", "merge latents with groups"), False, marks=pytest.mark.slow),
        pytest.param(
            (
                "attend to latents",
                "attend to latents of one rank of 8",
                "attend to latents for drafts",
                "attend to latents in fp8",
                "attend to latents with groups",
                "prefill latents",
                "prefill latents in fp8",
            ),
            True,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_kernels_of_a_decode_step_compile_for_a_gpu_without_spills(
    names: tuple[str, ...], uses_tensor_cores: bool
) -> None:
    assert compiled(*names) == [f"{name} {uses_tensor_cores} 0" for name in names]


@pytest.mark.slow
@NEEDS_TRITON
@pytest.mark.parametrize("tile", ["linear 16", "linear 16 split", "linear 64", "linear 64 split"])
def test_kernels_of_4_bit_weights_use_the_tensor_cores_and_do_not_spill(tile: str) -> None:
    names = [f"{tile} in groups of {group}" for group in (128, 32)]
    assert compiled(*names) == [f"{name} True 0" for name in names]


@pytest.mark.slow
@NEEDS_TRITON
@pytest.mark.parametrize("kind", ["wide", "long", "gated"])
def test_the_kernel_of_one_row_of_4_bit_weights_does_not_spill(kind: str) -> None:
    names = [f"{kind} 1 in groups of {group}" for group in (128, 32)]
    assert compiled(*names) == [f"{name} False 0" for name in names]


@pytest.mark.slow
@NEEDS_TRITON
def test_the_kernels_beside_the_matmuls_of_4_bit_weights_do_not_spill() -> None:
    assert compiled("unpack", "add splits") == ["unpack False 0", "add splits False 0"]


@pytest.mark.slow
@NEEDS_TRITON
@pytest.mark.parametrize("layer", ["qkv 16", "gated 16", "down 16", "qkv 64"])
def test_kernels_of_adapters_use_the_tensor_cores_and_hardly_spill(layer: str) -> None:
    """One row is multiplied in registers. There, one value that is used after the loop may be spilled."""
    blocks = [f"{kind} {layer} {tokens}" for kind in ("narrow", "widen") for tokens in ("few", "many")]
    assert compiled(*blocks) == [f"{name} True 0" for name in blocks]
    matmuls = [f"skinny {layer} {rows}" for rows in ("one", "one in fp8", "eight")]
    for name, multiplies, line in zip(matmuls, (False, False, True), compiled(*matmuls), strict=True):
        assert line.startswith(f"{name} {multiplies} ")
        assert int(line.rpartition(" ")[2]) <= 8


def compiled(*names: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(COMPILING), *names]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()
