"""Compiles kernels for a Hopper GPU, on any machine, and prints for each its name, whether it uses the tensor cores,
and whether it spills registers to memory.

    python compiling.py NAME...
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from triton import compiler
from triton.backends.compiler import GPUTarget

from craton.ml.kernels.triton import int4, paged_decode

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
INT4_TYPES = {
    **dict.fromkeys(("x", "bias", "out"), "*bf16"),
    **dict.fromkeys(("words", "other_words"), "*i32"),
    **dict.fromkeys(("scale", "other_scale"), "*fp16"),
    **dict.fromkeys(("zero", "other_zero"), "*u8"),
}
KERNELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "merge": (paged_decode._merge, {"SHARED": False, "ROWS": 4}),
    "merge with groups": (paged_decode._merge, {"SHARED": True, "ROWS": 4}),
    "attend": (paged_decode._attend, {"SHARED": False, "ROWS": 16}),
    "attend with groups": (paged_decode._attend, {"SHARED": True, "ROWS": 16}),
}


def compiled(
    kernel: Any, values: dict[str, Any], types: dict[str, str], warps: int = 4, stages: int = 3
) -> tuple[bool, bool]:
    """Whether a kernel uses the tensor cores, and whether it spills."""
    signature = {name: "constexpr" if name.isupper() else types.get(name, "i32") for name in kernel.arg_names}
    bound = {(place,): values[name] for place, name in enumerate(kernel.arg_names) if name.isupper()}
    # What a launch finds out: pointers and sizes that are multiples of 16, so that copies are asynchronous.
    divisible = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(kernel.arg_names) if name in types}
    source = compiler.ASTSource(kernel, signature, constexprs=bound, attrs=divisible)
    options = {"num_warps": warps, "num_stages": stages}
    asm = compiler.compile(source, target=GPUTarget("cuda", HOPPER, 32), options=options).asm
    return "mma" in asm["ptx"], "STL" in asm["sass"]


def int4_kernels() -> dict[str, tuple[Any, dict[str, Any], dict[str, str], int, int]]:
    """Every tile with zero points: groups of 128 in whole tiles, and of 32 in tiles that are partly padding."""
    base, bits = int4.ONES[torch.bfloat16]
    kernels = {}
    for kind, tiles in (("linear", int4.TILES), ("gated", int4.GATED_TILES)):
        for rows, (outs, slices, warps, stages) in tiles:
            for group in (128, 32):
                constants = {"GATED": kind == "gated", "ZEROED": True, "BIASED": kind == "linear", "EVEN": group == 128}
                constants |= {"GROUP": group, "PAIRS": min(4, group // 16), "OUTS": outs, "SLICES": slices}
                constants |= {"ROWS": max(8, rows), "UNIT": 128, "WORDS": 16, "BASE": base, "BITS": bits, "EARLY": True}
                kernels[f"{kind} {rows} {group}"] = (int4._few, constants, INT4_TYPES, warps, stages)
    constants = {"ZEROED": True, "GROUP": 128, "OUTS": int4.OUTS, "UNITS": int4.UNITS, "UNIT": 128, "WORDS": 16}
    return {**kernels, "unpack": (int4._unpack, constants, INT4_TYPES, 4, 3)}


INT4 = int4_kernels()
for name in sys.argv[1:]:
    if name in INT4:
        print(name, *compiled(*INT4[name]))
    else:
        kernel, constants = KERNELS[name]
        print(name, compiled(kernel, {**CONSTANTS, **constants}, TYPES)[0])
