"""Compiles kernels of a decode step for a Hopper GPU, on any machine, and prints for each its name, whether it uses the
tensor cores, and how many bytes of registers it spills.

    python compiling.py NAME...
"""

from __future__ import annotations

import re
import sys
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from triton import compiler, knobs
from triton.backends.compiler import GPUTarget

from craton.ml.kernels.triton import choose_kept, paged_decode

HOPPER = 90
CONSTANTS: dict[str, Any] = {
    **{"KV_HEADS": 8, "GROUP": 4, "QUERIES": 1, "PAGE": 16, "HEAD_DIM": 128, "DIM": 128, "WINDOW": 0, "WHOLE": False},
    **{"LARGE": 8, "REQUESTS": 64, "BLOCK": 64, "STEP": 4, "GROUPS": 32, "PREFIX_ROWS": 64, "PREFIX_BLOCK": 64},
    **{"LANES": choose_kept.LANES, "WIDTH": choose_kept.WIDTH, "PIVOTS": choose_kept.PIVOTS, "FAST": True},
    "EARLY": True,
}
TYPES = {
    **dict.fromkeys(("query", "cache", "out"), "*bf16"),
    **dict.fromkeys(("partial", "partial_sums", "prefix_partial", "prefix_sums"), "*fp32"),
    **dict.fromkeys(("table", "rows", "lengths", "skipped", "members"), "*i32"),
    **dict.fromkeys(("member_places", "group_ends", "group_rows", "group_tokens"), "*i32"),
    **dict.fromkeys(("temperatures", "logprob_temperatures", "top_ps", "min_ps", "logprobs"), "*fp32"),
    **dict.fromkeys(("seeds", "positions", "top_ks", "chosen"), "*i64"),
    "scale": "fp32",
}
ALIGNED = ("logits", "stride", "vocabulary")  # by 16, of what a kernel loads in vectors
KERNELS: dict[str, tuple[Any, dict[str, Any], int]] = {  # and the number of warps
    "merge": (paged_decode._merge, {"SHARED": False, "ROWS": 4}, 4),
    "merge with groups": (paged_decode._merge, {"SHARED": True, "ROWS": 4}, 4),
    "attend": (paged_decode._attend, {"SHARED": False, "ROWS": 16}, 4),
    "attend with groups": (paged_decode._attend, {"SHARED": True, "ROWS": 16}, 4),
    "choose kept bf16": (choose_kept._choose_kept, {"SHIFT": 16, "logits": "*bf16"}, choose_kept.WARPS),
    "choose kept fp32": (choose_kept._choose_kept, {"SHIFT": 0, "logits": "*fp32"}, choose_kept.WARPS),
}


def ptx_of(kernel: Any, given: dict[str, Any], warps: int) -> str:
    values, types = {**CONSTANTS, **given}, {**TYPES, **given}
    signature = {name: "constexpr" if name.isupper() else types.get(name, "i32") for name in kernel.arg_names}
    bound = {(place,): values[name] for place, name in enumerate(kernel.arg_names) if name.isupper()}
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(kernel.arg_names) if name in ALIGNED}
    source = compiler.ASTSource(kernel, signature, constexprs=bound, attrs=aligned)
    options = {"num_warps": warps, "num_stages": 3}
    return str(compiler.compile(source, target=GPUTarget("cuda", HOPPER, 32), options=options).asm["ptx"])


knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
for name in sys.argv[1:]:
    log = StringIO()
    with redirect_stdout(log):
        ptx = ptx_of(*KERNELS[name])
    print(name, "mma" in ptx, sum(int(number) for number in re.findall(r"(\d+) bytes spill", log.getvalue())))
