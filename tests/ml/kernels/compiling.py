"""Compiles kernels of a decode step for a Hopper GPU, on any machine, and prints for each its name, whether it uses the
tensor cores, and the bytes of registers that a thread spills to memory.

    python compiling.py NAME...
"""

from __future__ import annotations

import re
import subprocess
import sys
from tempfile import NamedTemporaryFile
from typing import Any

from triton import compiler, knobs
from triton.backends.compiler import GPUTarget

from craton.ml.kernels.triton import choose_kept, latents, paged_decode, paged_prefill, paged_store

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
# the kernel, its constants and warps, and other types
KERNELS: dict[str, tuple[Any, dict[str, Any]] | tuple[Any, dict[str, Any], dict[str, str]]] = {
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
    "prefill latents": (paged_prefill._attend, LATENTS),
    "prefill latents in fp8": (paged_prefill._attend, LATENTS | KEYS_IN_FP8, IN_FP8),
    "choose kept bf16": (choose_kept._choose_kept, {**CHOOSE, "SHIFT": 16}, {"logits": "*bf16"}),
    "choose kept fp32": (choose_kept._choose_kept, {**CHOOSE, "SHIFT": 0}, {"logits": "*fp32"}),
}


def compiled(kernel: Any, constants: dict[str, Any], types: dict[str, str] | None = None) -> dict[str, Any]:
    """PTX and binary of a kernel, with pointers and strides aligned as they are at a launch."""
    values, types = {**CONSTANTS, **constants}, TYPES | (types or {})
    kinds = {name: types.get(name, "i32") for name in kernel.arg_names}
    signature = {name: "constexpr" if name.isupper() else kind for name, kind in kinds.items()}
    bound = {(place,): values[name] for place, name in enumerate(kernel.arg_names) if name.isupper()}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if kinds[name].startswith("*") or name.endswith("stride") or name == "vocabulary"
    }
    source = compiler.ASTSource(kernel, signature, constexprs=bound, attrs=aligned)
    warps, stages = constants.get("WARPS", 4), 3
    if "TAIL" in constants:
        sizes = latents.FLOAT8 if types["cache"] == IN_FP8["cache"] else latents.NARROW
        warps, stages = constants.get("WARPS", sizes.warps), sizes.stages
    options = {"num_warps": warps, "num_stages": stages}
    return dict(compiler.compile(source, target=GPUTarget("cuda", HOPPER, 32), options=options).asm)


def spilled_bytes(binary: bytes) -> int:
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+).*LOCAL:(\d+)", usage)
    assert found is not None, usage
    return int(found[1]) + int(found[2])


for name in sys.argv[1:]:
    code = compiled(*KERNELS[name])
    print(name, "mma" in code["ptx"], spilled_bytes(code["cubin"]))
