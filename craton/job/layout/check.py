"""Validity of a layout: the divisibility of world, heads, experts, stages, sequence and batch.

`layout_is_valid` is cheap enough to be called for every layout of a search; `check_layout` gives the reasons and the
nearest valid values. Both implement the same rules; a property test keeps them equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from craton.formatting import counted
from craton.job.layout.layout import Layout
from craton.job.model import ModelShape

FP8_MULTIPLE = 16  # of both dimensions of a matrix in an fp8 matmul


def layout_is_valid(
    layout: Layout,
    shape: ModelShape,
    world: int,
    global_batch_sequences: int,
    sequence: int,
    *,
    trained: bool = False,
) -> bool:
    """Return exactly `not check_layout(...)`."""
    pp, tp, cp, ep, vpp = layout.pp, layout.tp, layout.cp, layout.ep, layout.vpp
    data_parallel = layout.replicate * layout.fsdp
    if pp * data_parallel * cp * tp != world or pp * vpp > shape.layers:
        return False
    if global_batch_sequences % (data_parallel * layout.micro_batch):
        return False
    if tp > 1 and ((sequence // cp) % tp or any(count % tp for count, _ in _cut_by_tensor(shape, tp, trained))):
        return False
    if cp > 1 and sequence % (2 * cp):
        return False
    if ep > 1 and (shape.experts == 0 or shape.experts % ep or (data_parallel * cp) % ep):
        return False
    if trained and (
        (ep > 1 and not _divides(ep, layout.fsdp * cp))
        or _uncut_experts(layout, shape)
        or _narrow_for_fp8(layout, shape)
        or (vpp > 1 and (global_batch_sequences // (data_parallel * layout.micro_batch)) % pp)
    ):
        return False
    if layout.schedule == "interleaved":
        return vpp > 1 and pp > 1
    return vpp == 1 or (pp > 1 and layout.schedule == "zero-bubble")


def check_layout(
    layout: Layout,
    shape: ModelShape,
    world: int,
    global_batch_sequences: int,
    sequence: int,
    *,
    trained: bool = False,
) -> list[str]:
    """Return the problems of a layout, each with the nearest valid value; empty if it is valid.

    `trained`: by Craton's own loop, which shards tables and widths without padding, shards experts evenly and never
    duplicates KV heads; other stacks may pad and duplicate.
    """
    return [
        *_world_problems(layout, world),
        *_pipeline_problems(layout, shape),
        *_tensor_problems(layout, shape, sequence, trained),
        *_expert_problems(layout, shape),
        *_batch_problems(layout, global_batch_sequences),
        *(_training_problems(layout, shape, global_batch_sequences) if trained else ()),
    ]


def check_served_layout(layout: Layout, shape: ModelShape, *, padded: bool = False) -> list[str]:
    """Return the reasons why tp and ep cannot be used to serve the model; each ends with the remedy. `padded`: by an
    engine that pads tables and widths and duplicates KV heads, as vLLM, SGLang and TensorRT-LLM do and Craton's does
    not."""
    # Tokens need not divide: a step is padded to a multiple of tp.
    problems = _tensor_problems(layout, shape, sequence=layout.tp, trained=not padded)
    problems += _served_expert_problems(layout, shape)
    if narrow := _narrow_for_fp8(layout, shape):
        problems.append(
            f"tp {layout.tp} does not split {' and '.join(narrow)} into multiples of {FP8_MULTIPLE}, as fp8 requires; "
            "write serve.precision: bf16"
        )
    return problems


def _served_expert_problems(layout: Layout, shape: ModelShape) -> list[str]:
    tp, ep = layout.tp, layout.ep
    if ep == 1:
        return []
    if not shape.is_moe:
        return [f"ep {ep} requires experts, but {shape.name} is dense; remove ep"]
    counts = {f"the model's {shape.experts} experts": shape.experts, f"tp {tp}": tp}
    undivided = [name for name, count in counts.items() if count % ep]
    if not undivided:
        return []
    nearest = _nearest(ep, lambda size: not any(count % size for count in counts.values()))
    more = f", or tp {ep}" if tp < ep and shape.experts % ep == 0 else ""
    return [
        f"ep {ep} does not divide {' and '.join(undivided)}; a server splits whole experts over its tp ranks; nearest: "
        f"ep {nearest}{more}"
    ]


def _world_problems(layout: Layout, world: int) -> list[str]:
    if layout.world == world:
        return []
    others = layout.pp * layout.replicate * layout.cp * layout.tp
    if world % others == 0:
        hint = f"fsdp {world // others} would fit"
    else:
        nearest = _nearest(others, lambda size: world % size == 0)
        hint = f"pp · replicate · cp · tp = {others} does not divide {world}; the nearest that does is {nearest}"
    sizes = " · ".join(f"{name} {getattr(layout, name)}" for name in ("pp", "replicate", "fsdp", "cp", "tp"))
    return [f"{sizes} = {counted(layout.world, 'rank')}, but the cluster has {counted(world, 'GPU')}; {hint}"]


def _pipeline_problems(layout: Layout, shape: ModelShape) -> list[str]:
    problems = []
    stages = layout.pp * layout.vpp
    if stages > shape.layers:
        hint = (
            f"use pp ≤ {shape.layers // layout.vpp}"
            if shape.layers >= layout.vpp
            else f"use vpp ≤ {shape.layers // layout.pp}"
        )
        problems.append(
            f"pp {layout.pp} · vpp {layout.vpp} = {counted(stages, 'stage')}, but the model has "
            f"{counted(shape.layers, 'layer')}; {hint}"
        )
    if layout.schedule == "interleaved" and layout.vpp == 1:
        problems.append("schedule interleaved needs vpp above 1; use vpp 2, or schedule 1f1b")
    if layout.schedule == "1f1b" and layout.vpp > 1:
        problems.append(f"vpp {layout.vpp} needs schedule interleaved or zero-bubble; with 1f1b use vpp 1")
    if layout.pp == 1 and (layout.vpp > 1 or layout.schedule == "interleaved"):
        problems.append(
            f"vpp {layout.vpp} with schedule {layout.schedule} needs a pipeline; use pp 2, or vpp 1 and 1f1b"
        )
    return problems


def _tensor_problems(layout: Layout, shape: ModelShape, sequence: int, trained: bool) -> list[str]:
    problems = []
    tp, cp = layout.tp, layout.cp
    undivided = [f"{count} {name}" for count, name in _cut_by_tensor(shape, tp, trained) if count % tp]
    if tp > 1 and undivided:
        nearest = _nearest(tp, lambda size: not any(count % size for count, _ in _cut_by_tensor(shape, size, trained)))
        may_copy = not trained and any("KV heads" in name for name in undivided)
        copied = ", nor is it a multiple of the KV heads" if may_copy else ""
        problems.append(f"tp {tp} does not divide the model's {' and '.join(undivided)}{copied}; nearest: tp {nearest}")
    if cp > 1 and sequence % (2 * cp):
        nearest = _nearest(cp, lambda size: size == 1 or sequence % (2 * size) == 0)
        problems.append(
            f"cp {cp} requires a sequence divisible by 2·cp = {2 * cp}, not {sequence}; nearest: cp {nearest}, "
            f"or sequence {_nearest_multiple(sequence, 2 * cp)}"
        )
    if tp > 1 and (sequence // cp) % tp:
        problems.append(
            f"tp {tp} does not divide the {sequence // cp} tokens per rank; "
            f"nearest: sequence {_nearest_multiple(sequence, tp * cp * (2 if cp > 1 else 1))}"
        )
    return problems


def _expert_problems(layout: Layout, shape: ModelShape) -> list[str]:
    problems = []
    ep = layout.ep
    if ep == 1:
        return []
    if shape.experts == 0:
        return [f"ep {ep} requires experts, but {shape.name} is dense; use ep 1"]
    ranks = layout.data_parallel * layout.cp
    if shape.experts % ep:
        nearest = _nearest(ep, lambda size: shape.experts % size == 0)
        problems.append(f"ep {ep} does not divide the model's {shape.experts} experts; nearest: ep {nearest}")
    if ranks % ep:
        nearest = _nearest(ep, lambda size: shape.experts % size == 0 and ranks % size == 0)
        problems.append(f"ep {ep} does not divide replicate · fsdp · cp = {ranks}; nearest: ep {nearest}")
    return problems


def _training_problems(layout: Layout, shape: ModelShape, global_batch_sequences: int) -> list[str]:
    problems = []
    ep, shards = layout.ep, layout.fsdp * layout.cp
    if ep > 1 and not _divides(ep, shards):
        nearest = _nearest(ep, lambda size: _divides(size, shards) and shape.experts % size == 0)
        problems.append(f"ep {ep} and fsdp · cp = {shards}: one must divide the other; nearest: ep {nearest}")
    if uncut := _uncut_experts(layout, shape):
        problems.append(
            f"each expert is sharded over {counted(expert_shards(layout), 'rank')} (fsdp · cp · tp without ep {ep}), "
            f"which does not divide its {' and '.join(uncut)}; use a larger ep, or more replicate and less fsdp"
        )
    if narrow := _narrow_for_fp8(layout, shape):
        nearest = _nearest(layout.tp, lambda size: not _narrow_for_fp8(replace(layout, tp=size), shape))
        problems.append(
            f"tp {layout.tp} does not split {' and '.join(narrow)} into multiples of {FP8_MULTIPLE}, as fp8 requires; "
            f"nearest: tp {nearest}, or precision bf16"
        )
    micro_batches = global_batch_sequences // (layout.data_parallel * layout.micro_batch)
    if layout.vpp > 1 and micro_batches % layout.pp:
        unit = layout.pp * layout.data_parallel * layout.micro_batch
        problems.append(
            f"with vpp {layout.vpp} the {micro_batches} micro-batches per step must be a multiple of pp {layout.pp}"
            f"; nearest: {_nearest_multiple(global_batch_sequences, unit)} sequences, or vpp 1"
        )
    return problems


def expert_shards(layout: Layout) -> int:
    """Return the number of ranks over which FSDP shards one expert: fsdp · cp · tp without ep."""
    return max(1, layout.fsdp * layout.cp // layout.ep) * layout.tp


def _uncut_experts(layout: Layout, shape: ModelShape) -> list[str]:
    """Return the expert sizes that the shards do not divide, if a rank has fewer experts than there are shards."""
    if shape.experts == 0 or layout.ep * layout.tp == 1:
        return []
    shards = expert_shards(layout)
    if shape.experts // layout.ep >= shards:
        return []
    sizes = {"hidden": shape.hidden, "moe_ffn_hidden": shape.moe_ffn_hidden}
    return [f"{name} {size}" for name, size in sizes.items() if size % shards]


def _narrow_for_fp8(layout: Layout, shape: ModelShape) -> list[str]:
    """Return the attention and MLP widths whose tp shards are not allowed in fp8 matmuls."""
    if layout.precision != "fp8" or layout.tp == 1:
        return []
    heads, mla = shape.heads, shape.mla
    queries, keys_and_values = heads * shape.head_dim, 2 * shape.kv_heads * shape.head_dim
    widths = {"heads · head_dim": queries, "(heads + 2 · kv_heads) · head_dim": queries + keys_and_values}
    if mla is not None:
        widths = {
            "heads · (qk_nope + qk_rope)": heads * (mla.qk_nope + mla.qk_rope),
            "heads · v_head": heads * mla.v_head,
        }
        widths["heads · (qk_nope + v_head)"] = heads * (mla.qk_nope + mla.v_head)
    if shape.dense_layers or not shape.is_moe:
        widths["ffn_hidden"] = shape.ffn_hidden
    if shape.shared_experts:
        widths["shared_experts · moe_ffn_hidden"] = shape.shared_experts * shape.moe_ffn_hidden
    return [f"{name} {width}" for name, width in widths.items() if width % (FP8_MULTIPLE * layout.tp)]


def _cut_by_tensor(shape: ModelShape, tp: int, trained: bool) -> list[tuple[int, str]]:
    """Return (count, name) of everything that tensor parallelism splits."""
    counts = [(shape.heads, "heads")]
    may_copy = not trained and tp % shape.kv_heads == 0
    if shape.mla is None and not may_copy:
        counts.append((shape.kv_heads, "KV heads"))
    if not trained:
        return counts
    if shape.dense_layers or not shape.is_moe:
        counts.append((shape.ffn_hidden, "of ffn_hidden"))
    if shape.shared_experts:
        counts.append((shape.shared_experts * shape.moe_ffn_hidden, "of shared_experts · moe_ffn_hidden"))
    counts.append((shape.vocab, "of vocab (tables are not padded)"))
    return counts


def _divides(one: int, other: int) -> bool:
    return one % other == 0 or other % one == 0


def _batch_problems(layout: Layout, global_batch_sequences: int) -> list[str]:
    ranks = layout.data_parallel
    together = ranks * layout.micro_batch
    if global_batch_sequences % together == 0:
        return []
    batch = f"the batch of {global_batch_sequences} sequences"
    shown = f"replicate · fsdp · micro_batch = {layout.replicate} · {layout.fsdp} · {layout.micro_batch} = {together}"
    multiple = _nearest_multiple(global_batch_sequences, together)
    hint = f"nearest: {multiple} sequences"
    if global_batch_sequences % ranks == 0:
        per_rank = global_batch_sequences // ranks
        micro_batch = _nearest(layout.micro_batch, lambda size: per_rank % size == 0)
        hint = f"nearest: micro_batch {micro_batch}, or {multiple} sequences"
    return [f"{batch} is not divisible by {shown}; {hint}"]


def _nearest(value: int, is_valid: Callable[[int], bool]) -> int:
    """Return the valid size nearest to `value`, the smaller of two; 1 is always valid."""
    for distance in range(value):
        for size in (value - distance, value + distance):
            if is_valid(size):
                return size
    return 1


def _nearest_multiple(number: int, unit: int) -> int:
    return max(unit, round(number / unit) * unit)
