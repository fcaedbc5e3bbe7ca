"""Compiles the decode kernels for a Hopper GPU, on any machine, and prints for each its name and whether it uses the
tensor cores.

    python compiling.py NAME...
"""

from __future__ import annotations

import sys
from typing import Any

from triton import compiler
from triton.backends.compiler import GPUTarget

from craton.ml.kernels.triton import paged_decode

HOPPER = 90
CONSTANTS: dict[str, Any] = {
    **{"KV_HEADS": 8, "GROUP": 4, "QUERIES": 1, "PAGE": 16, "HEAD_DIM": 128, "DIM": 128, "WINDOW": 0, "WHOLE": False},
    **{"LARGE": 8, "REQUESTS": 64, "BLOCK": 64, "STEP": 4, "GROUPS": 32, "PREFIX_ROWS": 64, "PREFIX_BLOCK": 64},
    "EARLY": True,
}
TYPES = {
    **dict.fromkeys(("query", "cache", "out"), "*bf16"),
    **dict.fromkeys(("partial", "partial_sums", "prefix_partial", "prefix_sums"), "*fp32"),
    **dict.fromkeys(("table", "rows", "lengths", "skipped", "members"), "*i32"),
    **dict.fromkeys(("member_places", "group_ends", "group_rows", "group_tokens"), "*i32"),
    "scale": "fp32",
}
KERNELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "merge": (paged_decode._merge, {"SHARED": False, "ROWS": 4}),
    "merge with groups": (paged_decode._merge, {"SHARED": True, "ROWS": 4}),
    "attend": (paged_decode._attend, {"SHARED": False, "ROWS": 16}),
    "attend with groups": (paged_decode._attend, {"SHARED": True, "ROWS": 16}),
}


def ptx_of(kernel: Any, constants: dict[str, Any]) -> str:
    values = {**CONSTANTS, **constants}
    signature = {name: "constexpr" if name.isupper() else TYPES.get(name, "i32") for name in kernel.arg_names}
    bound = {(place,): values[name] for place, name in enumerate(kernel.arg_names) if name.isupper()}
    source = compiler.ASTSource(kernel, signature, constexprs=bound)
    options = {"num_warps": 4, "num_stages": 3}
    return str(compiler.compile(source, target=GPUTarget("cuda", HOPPER, 32), options=options).asm["ptx"])


for name in sys.argv[1:]:
    print(name, "mma" in ptx_of(*KERNELS[name]))
