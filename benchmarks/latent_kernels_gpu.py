"""Check attention over latents (MLA) against its PyTorch twins in bf16 on this machine's GPU, and time it.

    python benchmarks/latent_kernels_gpu.py

Shapes are those of one rank: DeepSeek-V2-Lite with 16 heads (or DeepSeek-V3 with tp 8), and DeepSeek-V3 with 128. Times
are measured as in serving_kernels_gpu.py, whose functions this uses. Exits with 1 if a kernel is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import accumulate

import serving_kernels_gpu as gpu
import torch
from torch import Tensor

from craton.ml.kernels.serving import paged, shared_prefix

KV_LORA, QK_ROPE = 512, 64
WIDTH = KV_LORA + QK_ROPE
SCALE = (128 + QK_ROPE) ** -0.5
HEADS = (16, 128)


def main() -> int:
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    gpu.copy_bandwidth = gpu.measure_copy()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copy {gpu.copy_bandwidth / 1e12:.2f} TB/s")
    for measure in (check_all, decode, prefill, store):
        measure()
        torch.cuda.empty_cache()
    print("wrong: " + ", ".join(gpu.wrong) if gpu.wrong else "all kernels agree with their twins")
    return bool(gpu.wrong)


class Requests:
    """Requests with latents in scattered pages, and queries that attend to them."""

    def __init__(self, lengths: list[int], heads: int, layers: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.lengths, self.heads = lengths, heads
        self.table, blocks = gpu.scattered_table(lengths)
        self.cache = gpu.normal(blocks, layers, 1, 1, gpu.PAGE, WIDTH, dtype=dtype)
        self.rows, self.sizes = torch.arange(len(lengths), device="cuda").int(), gpu.integers(*lengths)
        self.longest = 1 << (max(lengths) - 1).bit_length()

    def decode(self, queries: int = 1) -> Callable[[int], Tensor]:
        query = gpu.normal(len(self.lengths) * queries, self.heads, WIDTH)
        options = {"longest": self.longest, "value_dim": KV_LORA}
        return lambda layer: paged.decode_attention(query, *self._where(layer), queries, SCALE, **options)

    def decode_shared(self) -> Callable[[int], Tensor]:
        """The longer half of the requests begins with common blocks, in two groups."""
        query, prefixes = gpu.normal(len(self.lengths), self.heads, WIDTH), gpu.share(self.table, self.lengths)
        options = {"longest": self.longest, "value_dim": KV_LORA}
        return lambda layer: shared_prefix.shared_decode_attention(
            query, *self._where(layer), prefixes, SCALE, **options
        )

    def prefill(self, asked: list[int]) -> Callable[[int], Tensor]:
        query, offsets = gpu.normal(sum(asked), self.heads, WIDTH), gpu.integers(0, *accumulate(asked))
        return lambda layer: paged.prefill_attention(query, *self._where(layer), offsets, SCALE, value_dim=KV_LORA)

    def _where(self, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.cache[:, layer % self.cache.shape[1]], self.table, self.rows, self.sizes


def check_all() -> None:
    lengths = [*gpu.ragged(31), 1]
    asked = [min(length, 1 + 37 * index) for index, length in enumerate(lengths)]
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        for heads in (16, 20, 128):
            requests = Requests(lengths, heads, 2, dtype)
            for name, call in (
                ("decode", requests.decode()),
                ("decode, 4 queries", requests.decode(4)),
                ("prefill", requests.prefill(asked)),
                ("decode with shared prefixes", requests.decode_shared()),
            ):
                gpu.check(f"{name}, {heads} heads, {dtype}", lambda call=call: (call(1),))
        stored = store_call(77, dtype)
        gpu.check(f"store, {dtype}", lambda stored=stored: (stored(1).float(),))


def decode() -> None:
    for name, lengths, layers in (
        ("64 requests of 8192", [8192] * 64, 4),
        ("256 requests of 4096", [4096] * 256, 2),
        ("256 requests of 100 to 1300", gpu.ragged(256), 8),
        ("32 requests of 100 to 1300", gpu.ragged(32), 32),
        ("1 request of 32768", [32768], 16),
        ("1 request of 600", [600], 64),
    ):
        for heads in HEADS:
            call = Requests(lengths, heads, layers).decode()
            gpu.report(f"decode, {name}, {heads} heads", gpu.seconds_of(call), sum(lengths) * WIDTH * 2)


def prefill() -> None:
    for name, asked, lengths in (
        ("2048 tokens", [2048], [2048]),
        ("2048 tokens after 14336", [2048], [16384]),
        ("8 requests of 44 to 1000", gpu.PROMPTS, gpu.PROMPTS),
        ("32 requests of 8 after 1016", [8] * 32, [1024] * 32),
    ):
        for heads in HEADS:
            seconds = gpu.seconds_of(Requests(lengths, heads, 1).prefill(asked), calls=4)
            scores = sum(own * (size - own) + own * (own + 1) / 2 for own, size in zip(asked, lengths, strict=True))
            rate = 2 * heads * (WIDTH + KV_LORA) * scores / seconds
            print(f"{f'prefill, {name}, {heads} heads':52}{seconds * 1e6:9.1f} us {rate / 1e12:6.0f} TFLOP/s")


def store() -> None:
    for tokens in (1, 256, 2048):
        gpu.report(f"store_latents, {tokens} tokens", gpu.seconds_of(store_call(tokens)), 2 * 2 * tokens * WIDTH)


def store_call(tokens: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[int], Tensor]:
    compressed, weight = gpu.normal(tokens, WIDTH), gpu.normal(KV_LORA)
    angle, slots = torch.rand(tokens, QK_ROPE // 2, device="cuda") * 6, torch.randperm(256 * gpu.PAGE, device="cuda")
    cosine, sine, cache = angle.cos(), angle.sin(), torch.zeros(256, 8, 1, 1, gpu.PAGE, WIDTH, device="cuda").to(dtype)

    def call(layer: int) -> Tensor:
        paged.store_latents(compressed, cosine, sine, weight, 1e-6, cache[:, layer % 8], slots[:tokens])
        return cache

    return call


if __name__ == "__main__":
    sys.exit(main())
