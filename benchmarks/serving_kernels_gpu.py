"""Check the serving kernels against their PyTorch twins in bf16 on this machine's GPU, and time them.

    python benchmarks/serving_kernels_gpu.py

Times are those of a CUDA graph with many calls on rotating buffers, larger together than the L2 cache; shares are of
the bandwidth of a copy, measured first (a kernel that only reads can exceed it). Exits with 1 if a kernel is wrong.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from craton.ml import kernels
from craton.ml.kernels import elementwise
from craton.ml.kernels.serving import SharedPrefixes, choose_kept, paged, shared_prefix, truncate
from craton.ml.kernels.triton import launch
from craton.ml.serving.device.shared_prefix import group_numbers, shared_prefixes
from craton.ml.serving.schedule import PrefixGroups

PAGE, HEAD_DIM, KV_HEADS = 16, 128, 8
HIDDEN, FFN_HIDDEN, VOCABULARY = 4096, 14336, 128256  # of the 8B shape
ALLOWED_ERROR = 1e-2  # ‖kernel - twin‖ / ‖twin‖, both rounded to bf16
L2_BYTES = 60e6
CUTS = {  # of sampling: top-k, top-p, min-p
    "top-p 0.9": (0, 0.9, 0.0),
    "top-k 50": (50, 1.0, 0.0),
    "top-k 50 and top-p 0.9": (50, 0.9, 0.0),
    "min-p 0.1": (0, 1.0, 0.1),
}
PROMPTS = [300, 512, 100, 900, 600, 44, 1000, 640]

copy_bandwidth = 0.0
wrong: list[str] = []


def main() -> int:
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    global copy_bandwidth
    copy_bandwidth = measure_copy()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copy {copy_bandwidth / 1e12:.2f} TB/s")
    for measure in (check_all, decode, prefill, skinny, layer, choose, store):
        measure()
        torch.cuda.empty_cache()
    print("wrong: " + ", ".join(wrong) if wrong else "all kernels agree with their twins")
    return bool(wrong)


def seconds_of(call: Callable[[int], object], calls: int = 16) -> float:
    """Return the median seconds of one call in a graph of many; `call` gets a counter to rotate its buffers."""
    for index in range(3):
        call(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            call(index)
    times = []
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / calls)
    return statistics.median(times[3:])


def report(name: str, seconds: float, read_bytes: float) -> None:
    bandwidth = read_bytes / seconds
    print(f"{name:52}{seconds * 1e6:9.1f} us {bandwidth / 1e12:6.2f} TB/s {bandwidth / copy_bandwidth:6.0%}")


def measure_copy() -> float:
    warm = normal(8192, 8192)
    for _ in range(100):  # the clock rises with the load
        warm @ warm
    source = normal(2**30)
    target = torch.empty_like(source)
    return 4 * source.numel() / seconds_of(lambda _: torch.neg(source, out=target), calls=4)


def normal(*shape: int, deviation: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(std=deviation).to(dtype)


def integers(*numbers: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device="cuda")


def paged_cache(lengths: list[int], layers: int) -> tuple[Tensor, Tensor]:
    """Return (cache of all layers, block table) with the requests' pages scattered over the blocks."""
    table, blocks = scattered_table(lengths)
    return normal(blocks, layers, 2, KV_HEADS, PAGE, HEAD_DIM), table


def scattered_table(lengths: list[int]) -> tuple[Tensor, int]:
    """Return (block table, number of blocks) of requests whose pages are scattered."""
    pages = [-(-length // PAGE) for length in lengths]
    blocks = torch.randperm(sum(pages), device="cuda").int()
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int32, device="cuda")
    for row, own in enumerate(blocks.split(pages)):
        table[row, : len(own)] = own
    return table, sum(pages)


def ragged(requests: int, shortest: int = 100, longest: int = 1300) -> list[int]:
    numbers = random.Random(0)
    return [numbers.randint(shortest, longest) for _ in range(requests)]


@contextmanager
def twins() -> Iterator[None]:
    """Use plain PyTorch for the operations of `paged` inside this context."""
    fused = elementwise.is_fused
    elementwise.is_fused = lambda _: False
    try:
        yield
    finally:
        elementwise.is_fused = fused


def check(name: str, compute: Callable[[], tuple[Tensor, ...]]) -> None:
    ours = compute()
    with twins():
        theirs = compute()
    error = max(
        ((left.double() - right.double()).norm() / right.double().norm()).item()
        for left, right in zip(ours, theirs, strict=True)
    )
    print(f"{name:52}{error:9.1e} from the twin")
    if not error <= ALLOWED_ERROR:
        wrong.append(name)


def check_all() -> None:
    lengths = [*ragged(31), 1]
    whole, table = paged_cache(lengths, 2)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        check_attention(whole.to(dtype)[:, 1], table, lengths)
        check_store(dtype)
    for rows in (1, 2, 5, 8):
        check_products(rows)
    logits, temperature = normal(64, VOCABULARY) * 3, torch.rand(64, device="cuda")
    temperature[::2] = 0
    seeds = torch.randint(-(2**62), 2**62, (64,), device="cuda")
    check("choose", lambda: paged.choose(logits, temperature, seeds, seeds >> 30, temperature))
    for name, cut in CUTS.items():
        given = (logits, temperature, seeds, seeds >> 30, temperature, *limits(64, cut))
        check(f"choose with {name}", partial(choose_kept, *given))
    check_early_launch()


def check_attention(cache: Tensor, table: Tensor, lengths: list[int]) -> None:
    rows, sizes = torch.arange(len(lengths), device="cuda").int(), integers(*lengths)

    def decoded(query: Tensor, queries: int, window: int) -> tuple[Tensor]:
        return (paged.decode_attention(query, cache, table, rows, sizes, queries, window=window, longest=2048),)

    for queries, window, heads in ((1, 0, 32), (4, 0, 32), (1, 300, 56), (2, 300, 16)):
        query = normal(len(lengths) * queries, heads, HEAD_DIM)
        name = f"decode {cache.dtype}, {queries} queries, window {window}, {heads} heads"
        check(name, partial(decoded, query, queries, window))
    asked = [min(length, 1 + 37 * index) for index, length in enumerate(lengths)]
    offsets = integers(0, *accumulate(asked))
    query = normal(sum(asked), 32, HEAD_DIM)

    def filled(window: int) -> tuple[Tensor]:
        return (paged.prefill_attention(query, cache, table, rows, sizes, offsets, window=window),)

    for window in (0, 300):
        check(f"prefill {cache.dtype}, window {window}", partial(filled, window))
    query, prefixes = normal(len(lengths), 32, HEAD_DIM), share(table, lengths)

    def decoded_together() -> tuple[Tensor]:
        return (shared_prefix.shared_decode_attention(query, cache, table, rows, sizes, prefixes, longest=2048),)

    check(f"decode with shared prefixes {cache.dtype}", decoded_together)


def share(table: Tensor, lengths: list[int]) -> SharedPrefixes:
    """Let the longer half of the requests begin with common blocks, in two groups."""
    order = sorted(range(len(lengths)), key=lambda request: -lengths[request])[: len(lengths) // 2]
    groups = [members for members in (order[::2], order[1::2]) if len(members) > 1]
    tokens = [min(lengths[member] - 1 for member in members) // PAGE * PAGE for members in groups]
    for members, shared in zip(groups, tokens, strict=True):
        table[members, : shared // PAGE] = table[members[0], : shared // PAGE]
    found = PrefixGroups(
        np.asarray([member for members in groups for member in members], np.int32),
        np.cumsum([len(members) for members in groups], dtype=np.int32),
        np.asarray([members[0] for members in groups], np.int32),
        np.asarray(tokens, np.int32),
    )
    return shared_prefixes(torch.from_numpy(group_numbers(found, len(lengths))).cuda(), len(lengths))


def check_products(rows: int) -> None:
    x, weight, other, bias = normal(rows, 4160), normal(1000, 4160), normal(1000, 4160), normal(1000)
    narrow, scale = weight.to(torch.float8_e4m3fn), torch.rand(1000, device="cuda")
    check(
        f"matmuls of {rows} rows",
        lambda: (
            paged.skinny_linear(x, weight, bias),
            paged.skinny_gated(x, weight, other),
            paged.skinny_linear(x, narrow, bias, scale),
            paged.skinny_gated(x, narrow, narrow, scale, scale),
        ),
    )


def check_store(dtype: torch.dtype) -> None:
    tokens, heads = 77, 32
    qkv = normal(tokens, (heads + 2 * KV_HEADS) * HEAD_DIM)
    angle = torch.rand(tokens, HEAD_DIM // 2, device="cuda") * 6
    slots = torch.randperm(10 * PAGE, device="cuda")[:tokens]
    weights = normal(HEAD_DIM), normal(HEAD_DIM)

    def stored() -> tuple[Tensor, Tensor]:
        cache = torch.zeros(10, 3, 2, KV_HEADS, PAGE, HEAD_DIM, device="cuda").to(dtype)
        own = cache[:, 1]
        query = paged.store_rotated(qkv, angle.cos(), angle.sin(), *weights, 1e-6, own, slots, heads, KV_HEADS)
        return query, cache.float()

    check(f"store with norms into {dtype}", stored)


def check_early_launch() -> None:
    """Check that a step with programmatic dependent launch is bitwise equal to one without."""
    step = decode_step(4, 512)
    step(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(0)
    results = []
    for _ in range(50):
        graph.replay()
        results.append(out.clone())
    starts_early = launch._starts_early
    launch._starts_early = lambda _: False
    plain = step(0)
    launch._starts_early = starts_early
    differing = sum(not torch.equal(result, plain) for result in results)
    print(f"{'graph of early launches against a plain one':52}{differing:9} of 50 differ")
    if differing or not plain.isfinite().all():
        wrong.append("early launches")


def decode() -> None:
    for name, lengths, layers, group, longest in (
        ("64 requests of 8192", [8192] * 64, 2, 4, 8192),
        ("256 requests of 4096", [4096] * 256, 1, 4, 4096),
        ("16 requests of 16384", [16384] * 16, 2, 4, 16384),
        ("256 requests of 100 to 1300", ragged(256), 4, 4, 2048),
        ("256 requests of 100 to 1300, 16 heads", ragged(256), 4, 2, 2048),
        ("32 requests of 100 to 1300", ragged(32), 16, 4, 2048),
        ("1 request of 32768", [32768], 8, 4, 32768),
        ("1 request of 600", [600], 64, 4, 1024),
    ):
        call = decode_call(lengths, layers, group, longest)
        report(f"decode, {name}", seconds_of(call), sum(lengths) * KV_HEADS * HEAD_DIM * 2 * 2)
    for members, others in ((4, 0), (16, 0), (64, 0), (8, 56), (64, 64)):
        for shared in (256, 1024, 4096):
            for group in (4, 2):
                compare_shared(members, others, shared, 512, group)
        torch.cuda.empty_cache()


def compare_shared(members: int, others: int, shared: int, own: int, group: int) -> None:
    """Time attention of `members` requests that begin with the same blocks, and others of the same length, with one
    read of these blocks and with a read for each request, of which the L2 cache serves a part."""
    requests = members + others
    layers = max(2, min(16, 2**16 // (shared + members * own + others * (shared + own))))
    cache, tables = paged_cache([shared, *[own] * members, *[shared + own] * others], layers)
    table = torch.zeros(requests, (shared + own) // PAGE, dtype=torch.int32, device="cuda")
    table[:members, : shared // PAGE] = tables[0, : shared // PAGE]
    table[:members, shared // PAGE :] = tables[1 : 1 + members, : own // PAGE]
    if others:
        table[members:] = tables[1 + members :, : (shared + own) // PAGE]
    rows, sizes = torch.arange(requests, device="cuda").int(), integers(*[shared + own] * requests)
    one = (np.asarray([number], np.int32) for number in (members, 0, shared))
    numbers = group_numbers(PrefixGroups(np.arange(members, dtype=np.int32), *one), requests)
    prefixes = shared_prefixes(torch.from_numpy(numbers).cuda(), requests)
    query = normal(requests, KV_HEADS * group, HEAD_DIM)

    def together(index: int) -> Tensor:
        where = (cache[:, index % layers], table, rows, sizes)
        return shared_prefix.shared_decode_attention(query, *where, prefixes, longest=shared + own)

    def apart(index: int) -> Tensor:
        return paged.decode_attention(query, cache[:, index % layers], table, rows, sizes, longest=shared + own)

    ours, theirs = seconds_of(together), seconds_of(apart)
    name = f"decode, {members} of {requests} share {shared} of {shared + own}, {8 * group} heads"
    print(f"{name:52}{ours * 1e6:9.1f} us  {theirs * 1e6:9.1f} us without  ratio {theirs / ours:.2f}")


def decode_call(lengths: list[int], layers: int, group: int, longest: int) -> Callable[[int], Tensor]:
    cache, table = paged_cache(lengths, layers)
    rows, sizes = torch.arange(len(lengths), device="cuda").int(), integers(*lengths)
    query = normal(len(lengths), KV_HEADS * group, HEAD_DIM)
    return lambda index: paged.decode_attention(query, cache[:, index % layers], table, rows, sizes, longest=longest)


def prefill() -> None:
    for name, asked, lengths in (
        ("2048 tokens", [2048], [2048]),
        ("2048 tokens after 14336", [2048], [16384]),
        ("8 requests of 44 to 1000", PROMPTS, PROMPTS),
        ("16 requests of 128 after 1920", [128] * 16, [2048] * 16),
        ("32 requests of 8 after 1016", [8] * 32, [1024] * 32),
    ):
        seconds = seconds_of(prefill_call(asked, lengths))
        scores = sum(own * (size - own) + own * (own + 1) / 2 for own, size in zip(asked, lengths, strict=True))
        rate = 4 * 32 * HEAD_DIM * scores / seconds
        print(f"{'prefill, ' + name:52}{seconds * 1e6:9.1f} us {rate / 1e12:6.0f} TFLOP/s")


def prefill_call(asked: list[int], lengths: list[int]) -> Callable[[int], Tensor]:
    cache, table = paged_cache(lengths, 1)
    rows, sizes = torch.arange(len(asked), device="cuda").int(), integers(*lengths)
    offsets = integers(0, *accumulate(asked))
    query = normal(sum(asked), 32, HEAD_DIM)
    return lambda _: paged.prefill_attention(query, cache[:, 0], table, rows, sizes, offsets)


def skinny() -> None:
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        for outs, columns in ((6144, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, FFN_HIDDEN), (VOCABULARY, HIDDEN)):
            weights = weight_ring(outs, columns, dtype)
            for rows in (1, 2, 4, 8):
                seconds = seconds_of(linear_call(rows, weights))
                report(f"{rows} rows × [{outs}, {columns}] {dtype}", seconds, weights[0].nbytes)
        weights = weight_ring(FFN_HIDDEN, HIDDEN, dtype)
        for rows in (1, 2, 4, 8):
            seconds = seconds_of(gated_call(rows, weights))
            report(f"{rows} rows × gate and up [{FFN_HIDDEN}, {HIDDEN}] {dtype}", seconds, 2 * weights[0].nbytes)


def linear_call(rows: int, weights: list[Tensor]) -> Callable[[int], Tensor]:
    x, scale = normal(rows, weights[0].shape[1]), unit_scale(weights[0])
    return lambda index: paged.skinny_linear(x, weights[index % len(weights)], None, scale)


def gated_call(rows: int, weights: list[Tensor]) -> Callable[[int], Tensor]:
    x, scale, count = normal(rows, weights[0].shape[1]), unit_scale(weights[0]), len(weights) // 2
    return lambda index: paged.skinny_gated(x, weights[index % count], weights[count + index % count], scale, scale)


def unit_scale(weight: Tensor) -> Tensor | None:
    return torch.ones(weight.shape[0], device="cuda") if weight.dtype == torch.float8_e4m3fn else None


def weight_ring(outs: int, columns: int, dtype: torch.dtype) -> list[Tensor]:
    count = 2 + int(4 * L2_BYTES / (outs * columns * dtype.itemsize))
    return [normal(outs, columns, deviation=0.02, dtype=dtype) for _ in range(count)]


def decode_step(requests: int, length: int, layers: int = 6) -> Callable[[int], Tensor]:
    """Run the kernels of all layers of a step of the 8B shape with few requests; the counter is not used."""
    cache, table = paged_cache([length] * requests, layers)
    rows, sizes = torch.arange(requests, device="cuda").int(), integers(*[length] * requests)
    slots = table[:, (length - 1) // PAGE].long() * PAGE + (length - 1) % PAGE
    angle = torch.rand(requests, HEAD_DIM // 2, device="cuda")
    cosine, sine = angle.cos(), angle.sin()
    start = normal(requests, HIDDEN)
    weights = [
        [
            normal(HIDDEN),
            normal((32 + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, deviation=0.02),
            normal(HIDDEN, HIDDEN, deviation=0.02),
            normal(FFN_HIDDEN, HIDDEN, deviation=0.02),
            normal(FFN_HIDDEN, HIDDEN, deviation=0.02),
            normal(HIDDEN, FFN_HIDDEN, deviation=0.02),
        ]
        for _ in range(layers)
    ]

    def step(_: int) -> Tensor:
        residual, delta = start, start
        for index, (gain, qkv, output, gate, up, down) in enumerate(weights):
            residual, normed = kernels.add_norm(residual, delta, gain, 1e-5)
            own = cache[:, index]
            query = paged.store_rotated(
                paged.skinny_linear(normed, qkv), cosine, sine, None, None, 0.0, own, slots, 32, KV_HEADS
            )
            mixed = paged.decode_attention(query, own, table, rows, sizes, longest=1024)
            delta = paged.skinny_linear(mixed.flatten(1), output)
            residual, normed = kernels.add_norm(residual, delta, gain, 1e-5)
            delta = paged.skinny_linear(paged.skinny_gated(normed, gate, up), down)
        return residual + delta

    return step


def layer() -> None:
    """Time one layer of the 8B shape as in a decode step, weights read once."""
    weight_bytes = 2 * HIDDEN * (6144 + HIDDEN + 3 * FFN_HIDDEN)
    for requests in (1, 8):
        layers = 6
        seconds = seconds_of(decode_step(requests, 600, layers), calls=2) / layers
        report(f"a whole layer, {requests} requests of 600", seconds, weight_bytes)


def choose() -> None:
    for requests in (1, 64, 256):
        for name, temperature in (("greedy", 0.0), ("sampled", 0.7)):
            seconds = seconds_of(choose_call(requests, temperature))
            report(f"sample, {requests} rows, {name}", seconds, 2 * requests * VOCABULARY)

    for requests in (1, 256):
        for name, cut in CUTS.items():
            compare_kept(requests, name, cut)


def limits(requests: int, cut: tuple[int, float, float]) -> tuple[Tensor, Tensor, Tensor]:
    top_k, top_p, min_p = (torch.full((requests,), value, device="cuda") for value in cut)
    return top_k, top_p, min_p


def compare_kept(requests: int, name: str, cut: tuple[int, float, float]) -> None:
    """Time sampling from kept tokens, with log-probabilities of the model and of the kept ones, and beside it the sort
    that alternatives still need, which is no sampling yet."""
    ring = logits_ring(requests)
    temperatures, counter = torch.full((requests,), 0.7, device="cuda"), torch.arange(requests, device="cuda")
    cuts = limits(requests, cut)
    read_bytes = 2 * requests * VOCABULARY
    for asked, scored in (("", torch.zeros_like(temperatures)), (", its log-probs", temperatures)):

        def call(index: int, scored: Tensor = scored) -> tuple[Tensor, Tensor]:
            return choose_kept(ring[index % len(ring)], temperatures, counter, counter, scored, *cuts)

        report(f"sample, {requests} rows, {name}{asked}", seconds_of(call), read_bytes)
    seconds = eager_seconds_of(lambda index: truncate(ring[index % len(ring)], temperatures, *cuts))
    report(f"sort, {requests} rows, {name}", seconds, read_bytes)


def eager_seconds_of(call: Callable[[int], object], calls: int = 16) -> float:
    """Return the median seconds of one call outside of a graph, many of which are in flight."""
    times = []
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for index in range(calls):
            call(index)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / calls)
    return statistics.median(times[3:])


def logits_ring(requests: int) -> list[Tensor]:
    count = 2 + int(L2_BYTES / (2 * requests * VOCABULARY))
    return [normal(requests, VOCABULARY, deviation=2.5) for _ in range(count)]


def choose_call(requests: int, temperature: float) -> Callable[[int], tuple[Tensor, Tensor]]:
    ring = logits_ring(requests)
    temperatures, counter = torch.full((requests,), temperature, device="cuda"), torch.arange(requests, device="cuda")
    return lambda index: paged.choose(ring[index % len(ring)], temperatures, counter, counter, temperatures)


def store() -> None:
    for tokens in (1, 256, 2048):
        seconds = seconds_of(store_call(tokens))
        report(f"store_rotated, {tokens} tokens", seconds, 2 * 2 * tokens * (32 + 2 * KV_HEADS) * HEAD_DIM)


def store_call(tokens: int) -> Callable[[int], Tensor]:
    qkv, cache = normal(tokens, (32 + 2 * KV_HEADS) * HEAD_DIM), normal(256, 8, 2, KV_HEADS, PAGE, HEAD_DIM)
    angle, slots = torch.rand(tokens, HEAD_DIM // 2, device="cuda"), torch.randperm(256 * PAGE, device="cuda")[:tokens]
    return lambda index: paged.store_rotated(
        qkv, angle, angle, None, None, 0.0, cache[:, index % 8], slots, 32, KV_HEADS
    )


if __name__ == "__main__":
    sys.exit(main())
