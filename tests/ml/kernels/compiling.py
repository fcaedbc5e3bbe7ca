"""Compiles kernels for a Hopper GPU, on any machine, and prints for each its name, whether it uses the tensor cores,
and the bytes of registers that a thread spills to memory.

    python compiling.py NAME...
"""

from __future__ import annotations

import re
import sys
from contextlib import redirect_stdout
from io import StringIO
from itertools import product
from typing import Any

import torch
from triton import compiler, knobs
from triton.backends.compiler import GPUTarget

from craton.ml.kernels.triton import (
    adapters,
    choose_kept,
    int4,
    int4_many,
    int4_single,
    latents,
    paged_decode,
    paged_prefill,
    paged_store,
    skinny,
)

HOPPER = 90
CONSTANTS: dict[str, Any] = {
    **{"KV_HEADS": 8, "GROUP": 4, "QUERIES": 1, "PAGE": 16, "HEAD_DIM": 128, "DIM": 128, "WINDOW": 0, "WHOLE": False},
    **{"LARGE": 8, "REQUESTS": 64, "BLOCK": 64, "STEP": 4, "GROUPS": 32, "PREFIX_ROWS": 64, "PREFIX_BLOCK": 64},
    **{"TAIL": 0, "TAIL_DIM": 0, "EARLY": True},
    **{"LANES": choose_kept.LANES, "WIDTH": choose_kept.WIDTH, "PIVOTS": choose_kept.PIVOTS, "FAST": True},
}
# DeepSeek-V3 on one rank: 128 heads, latents of 512 numbers and a tail of 64
ROWS, KEYS = latents.NARROW.max_rows, latents.NARROW.keys
KEYS_IN_FP8 = dict.fromkeys(("BLOCK", "PREFIX_BLOCK", "TILE"), latents.FLOAT8.keys)
LATENTS: dict[str, Any] = {
    **{"KV_HEADS": 128 // ROWS, "GROUP": ROWS, "HEAD_DIM": 512, "DIM": 512, "TAIL": 64, "TAIL_DIM": 64},
    **{"ROWS": ROWS, "BLOCK": KEYS, "PREFIX_ROWS": ROWS, "PREFIX_BLOCK": KEYS, "TOKENS": 1, "TILE": KEYS},
    **{"SHARED": False, "REQUESTS": 256, "KV_LORA": 512, "HALF": 32, "LARGEST": 448.0, "HALF_BLOCK": 32},
}
PREFILL: dict[str, Any] = {**dict(zip(("ROWS", "TILE"), paged_prefill.NARROW, strict=False)), "TOKENS": 32}
PREFILL |= {"REQUESTS": 256}
CHOOSE: dict[str, Any] = {"WARPS": choose_kept.WARPS}
LATENT_MERGE = dict(zip(("STEP", "WARPS", "ROWS"), paged_decode.LATENT_MERGE, strict=True))
TYPES = {
    **dict.fromkeys(("query", "cache", "out", "compressed", "weight"), "*bf16"),
    **dict.fromkeys(("partial", "partial_sums", "prefix_partial", "prefix_sums", "cosine", "sine"), "*fp32"),
    **dict.fromkeys(("table", "rows", "lengths", "skipped", "members", "offsets"), "*i32"),
    **dict.fromkeys(("member_places", "group_ends", "group_rows", "group_tokens"), "*i32"),
    **dict.fromkeys(("temperatures", "logprob_temperatures", "top_ps", "min_ps", "logprobs"), "*fp32"),
    **dict.fromkeys(("slots", "seeds", "positions", "top_ks", "chosen"), "*i64"),
    **{"scale": "fp32", "epsilon": "fp32"},
}
IN_FP8 = {"cache": "*fp8e4nv"}
INT4_TYPES = {
    **dict.fromkeys(("x", "bias", "out"), "*bf16"),
    **dict.fromkeys(("words", "other_words"), "*i32"),
    **dict.fromkeys(("scale", "other_scale"), "*fp16"),
    **dict.fromkeys(("zero", "other_zero"), "*u8"),
    **{"partial": "*fp32", "rows": "i32"},
}
# the kernel, its constants, other types, warps and stages
KERNELS: dict[str, tuple[Any, ...]] = {
    "merge": (paged_decode._merge, {"SHARED": False, "ROWS": 4}),
    "merge with groups": (paged_decode._merge, {"SHARED": True, "ROWS": 4}),
    "attend": (paged_decode._attend, {"SHARED": False, "ROWS": 16}),
    "attend with groups": (paged_decode._attend, {"SHARED": True, "ROWS": 16}),
    "store latents": (paged_store._store_latents, {**LATENTS, "WARPS": paged_store.LATENT_WARPS}, IN_FP8),
    "merge latents": (paged_decode._merge, {**LATENTS, **LATENT_MERGE}),
    "merge latents with groups": (paged_decode._merge, {**LATENTS, **LATENT_MERGE, "SHARED": True}),
    "attend to latents": (paged_decode._attend, LATENTS),
    "attend to latents of one rank of 8": (paged_decode._attend, {**LATENTS, "KV_HEADS": 1, "GROUP": 16, "ROWS": 16}),
    "attend to latents for drafts": (paged_decode._attend, {**LATENTS, "KV_HEADS": 16, "GROUP": 8, "QUERIES": 4}),
    "attend to latents in fp8": (paged_decode._attend, LATENTS | KEYS_IN_FP8, IN_FP8),
    "attend to latents with groups": (paged_decode._attend, {**LATENTS, "SHARED": True}),
    "prefill": (paged_prefill._attend, PREFILL, {}, *paged_prefill.NARROW[2:]),
    "prefill with blocks that tiles do not end with": (
        paged_prefill._attend,
        {**PREFILL, "PAGE": 24},
        {},
        *paged_prefill.NARROW[2:],
    ),
    "prefill with a window": (paged_prefill._attend, {**PREFILL, "WINDOW": 512}, {}, *paged_prefill.NARROW[2:]),
    "prefill in fp8": (paged_prefill._attend, PREFILL, IN_FP8, *paged_prefill.NARROW[2:]),
    "prefill latents": (paged_prefill._attend, LATENTS),
    "prefill latents in fp8": (paged_prefill._attend, LATENTS | KEYS_IN_FP8, IN_FP8),
    "choose kept bf16": (choose_kept._choose_kept, {**CHOOSE, "SHIFT": 16}, {"logits": "*bf16"}),
    "choose kept fp32": (choose_kept._choose_kept, {**CHOOSE, "SHIFT": 0}, {"logits": "*fp32"}),
}


def ptx_of(
    kernel: Any, constants: dict[str, Any], types: dict[str, str] | None = None, warps: int = 4, stages: int = 3
) -> str:
    """Compile a kernel with pointers and strides aligned as a launch finds them."""
    values, types = {**CONSTANTS, **constants}, TYPES | (types or {})
    kinds = {name: types.get(name, "i32") for name in kernel.arg_names}
    signature = {name: "constexpr" if name.isupper() else kind for name, kind in kinds.items()}
    bound = {(place,): values[name] for place, name in enumerate(kernel.arg_names) if name.isupper()}
    divisible = {name for name in kernel.arg_names if name.endswith("stride") or name in ("vocabulary", "columns")}
    divisible |= {name for name, kind in kinds.items() if kind.startswith("*")}
    divisible -= {parameter.name for parameter in kernel.params if parameter.do_not_specialize_on_alignment}
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(kernel.arg_names) if name in divisible}
    source = compiler.ASTSource(kernel, signature, constexprs=bound, attrs=aligned)
    if "TAIL" in constants:
        sizes = latents.FLOAT8 if types["cache"] == IN_FP8["cache"] else latents.NARROW
        warps, stages = sizes.warps, sizes.stages
    options = {"num_warps": constants.get("WARPS", warps), "num_stages": stages}
    return str(compiler.compile(source, target=GPUTarget("cuda", HOPPER, 32), options=options).asm["ptx"])


def int4_kernels() -> dict[str, tuple[Any, dict[str, Any], dict[str, str], int, int]]:
    """Every tile with zero points: groups of 128 in whole tiles, and of 32 in tiles that are partly padding."""
    base, bits = int4.ONES[torch.bfloat16]
    kernels = {}
    shared = {"ZEROED": True, "BASE": base, "BITS": bits, "EARLY": True}
    for group in (128, 32):
        of_group = {**shared, "EVEN": group == 128, "GROUP": group, "GROUPS": 128 // group, "PIECES": group // 16}
        for kind, (outs, warps) in (("wide", int4.WIDE), ("long", int4.LONG), ("gated", int4.LONG)):
            of_tile = {"GATED": kind == "gated", "BIASED": kind != "gated"}
            of_tile |= {"OUTS": outs, "UNITS": int4.UNITS_PER_WARP * warps}
            kernels[f"{kind} 1 in groups of {group}"] = (int4_single.single, of_group | of_tile, INT4_TYPES, warps, 3)
        for rows, (outs, tile_rows, warps, stages) in int4.MANY:
            for is_split in (False, True):
                of_tile = {"OUTS": outs, "ROWS": tile_rows, "SPLIT": is_split, "BIASED": not is_split}
                types = INT4_TYPES | {"out": "*fp32" if is_split else "*bf16"}
                name = f"linear {rows}{' split' * is_split} in groups of {group}"
                kernels[name] = (int4_many.many, of_group | of_tile, types, warps, stages)
    constants = {**shared, "EVEN": True, "GROUP": 128, "OUTS": int4.OUTS, "COLUMNS": int4.COLUMNS}
    kernels["unpack"] = (int4._unpack, constants, INT4_TYPES, int4.UNPACK_WARPS, 3)
    constants = {**shared, "SUMS": int4.SUMS, "BIASED": True}
    return {**kernels, "add splits": (int4_many.add_splits, constants, INT4_TYPES, 4, 3)}


def adapter_kernels() -> dict[str, tuple[Any, dict[str, Any], dict[str, str], int, int]]:
    """The layers of Llama 3.1 8B with 8 slots of rank 16, and of rank 64: what multiplies with A, with B, and the
    matmuls of few rows that add adapters."""
    kernels = {}
    layers = {"qkv": (4096, 6144, 3, False), "gated": (4096, 14336, 1, True), "down": (14336, 4096, 1, False)}
    wide = dict.fromkeys(("x", "a", "b", "other_b", "out", "other_out", "weight", "other", "bias"), "*bf16")
    types = {**wide, **dict.fromkeys(("narrow", "scale", "other_scale"), "*fp32"), "slots": "*i32", "rows": "i32"}
    for rank, (layer, (columns, outs, parts, is_pair)) in product((16, 64), layers.items()):
        lines = parts * rank
        both = lines * 2 if is_pair else lines
        base = {"SLOTS": 8, "RANK": rank, "EARLY": True}
        for name, tiles in (("few", adapters.SMALL), ("many", adapters.LARGE)):
            block = {**base, "BLOCK": tiles.tokens, "SPLITS": -(-columns // tiles.columns)}
            narrow = {"COLUMNS": columns, "LINES": both, "TILE_LINES": adapters._tile_lines(both), "STEP": 128}
            narrow["SPAN"] = tiles.columns
            kernels[f"narrow {layer} {rank} {name}"] = adapters._narrow, block | narrow, types, tiles.narrow_warps, 3
            widen = {"WIDTH": outs, "LINES": lines, "PAIR": int(is_pair), "TILE_LINES": adapters._tile_lines(lines)}
            widen["OUTS"] = tiles.outs
            kernels[f"widen {layer} {rank} {name}"] = adapters._widen, block | widen, types, tiles.widen_warps, 3
        few = {**base, "LINES": lines, "SPLITS": -(-columns // adapters.SMALL.columns), "GATED": is_pair}
        few |= {"SCALED": False, "BIASED": False}
        row, warps = row_constants(torch.bfloat16, torch.bfloat16, outs, columns, is_pair)
        kernels[f"skinny {layer} {rank} one"] = skinny._single, few | row, types, warps, 3
        row, warps = row_constants(torch.bfloat16, torch.float8_e4m3fn, outs, columns, is_pair)
        in_fp8 = types | dict.fromkeys(("weight", "other"), "*fp8e4nv")
        kernels[f"skinny {layer} {rank} one in fp8"] = skinny._single, few | row | {"SCALED": True}, in_fp8, warps, 3
        tile = {**dict(zip(("OUTS", "COLUMNS", "SLICES"), skinny.FEW, strict=False)), "ROWS": skinny.MAX_ROWS}
        kernels[f"skinny {layer} {rank} eight"] = skinny._few, few | tile | {"EVEN": True}, types, *skinny.FEW[3:]
    return kernels


def row_kernels() -> dict[str, tuple[Any, dict[str, Any], dict[str, str], int, int]]:
    """Matmuls of one row with the weights of Llama 3.1 8B, and with as many inputs as load at once."""
    kernels = {}
    kinds = {
        "bf16": (torch.bfloat16, "*bf16"),
        "fp32": (torch.float32, "*fp32"),
        "fp8": (torch.float8_e4m3fn, "*fp8e4nv"),
    }
    layers = {"qkv": (6144, 4096, False), "gated": (14336, 4096, True), "down": (4096, 14336, False)}
    layers["gated of 7,168"] = (18432, 7168, True)
    for (kind, (dtype, pointer)), (layer, (outs, columns, is_gated)) in product(kinds.items(), layers.items()):
        in_fp8 = kind == "fp8"
        row, warps = row_constants(torch.bfloat16 if in_fp8 else dtype, dtype, outs, columns, is_gated)
        row |= {"GATED": is_gated, "SCALED": in_fp8, "BIASED": not is_gated, "EARLY": True}
        row |= {"LINES": 0, "SLOTS": 0, "RANK": 0, "SPLITS": 0}
        types = dict.fromkeys(("x", "bias", "b", "other_b", "narrow", "out"), "*bf16" if in_fp8 else pointer)
        types |= {**dict.fromkeys(("weight", "other"), pointer), **dict.fromkeys(("scale", "other_scale"), "*fp32")}
        kernels[f"one row in {kind}, {layer}"] = skinny._single, row, types | {"slots": "*i32"}, warps, 3
    return kernels


def row_constants(
    x: torch.dtype, weight: torch.dtype, outs: int, columns: int, is_gated: bool
) -> tuple[dict[str, Any], int]:
    row = torch.empty(1, columns, dtype=x, device="meta")
    constants = skinny._one_row(row, torch.empty(outs, columns, dtype=weight, device="meta"), is_gated)
    return constants, constants.pop("num_warps")


INT4, ADAPTERS, ROW = int4_kernels(), adapter_kernels(), row_kernels()
knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
for name in sys.argv[1:]:
    log = StringIO()
    with redirect_stdout(log):
        ptx = ptx_of(*(INT4 | ADAPTERS | ROW | KERNELS)[name])
    print(name, "mma" in ptx, sum(int(number) for number in re.findall(r"(\d+) bytes spill", log.getvalue())))
