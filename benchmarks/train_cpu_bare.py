"""The quickstart's step compared with a bare PyTorch FSDP2 loop of the same model: 2 ranks, same threads, in turns.

    python benchmarks/train_cpu_bare.py [OUT.json] [--rounds 5] [--steps 10]

Ours is the whole loop with data, recording and clipping; the bare one is what a PyTorch user would write: separate
projections, logits and cross_entropy, fully_shard per layer, fused AdamW, clip_grad_norm_, tokens already in memory.
Both run in the same two processes in turns; the result is the median of the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

from craton.job import Job, load_job
from craton.job.model import ModelShape
from craton.ml.data import prepare
from craton.ml.training import Trainer
from craton.ml.training.build import RankIdentity, build
from craton.telemetry import RunDirectory
from craton.telemetry.rank import LedgerClock, Recorder

JOB = Path(__file__).parent.parent / "examples" / "quickstart.yaml"
RANKS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    prepare(load_job(JOB))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // RANKS))
    with tempfile.TemporaryDirectory() as root:
        run = RunDirectory.create(Path(root), "quickstart")
        run.job_path.write_text(JOB.read_text(encoding="utf-8"), encoding="utf-8")
        results: list[tuple[float, float]] = []
        context = multiprocessing.get_context("spawn")
        queue = context.SimpleQueue()
        started = multiprocessing.start_processes(
            rank, (str(run.path), arguments.rounds, arguments.steps, queue), RANKS, join=False
        )
        for _ in range(arguments.rounds):
            ours, bare = queue.get()
            results.append((ours, bare))
            print(f"ours {ours * 1e3:7.1f} ms   bare {bare * 1e3:7.1f} ms   ratio {ours / bare:.3f}", flush=True)
        started.join()
    ratio = statistics.median(ours / bare for ours, bare in results)
    print(f"median of {len(results)}: ratio {ratio:.3f}")
    if arguments.out:
        row = {"ratio": ratio, "rounds": results, "torch": torch.__version__, "date": date.today().isoformat()}
        Path(arguments.out).write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")


def rank(number: int, run: str, rounds: int, steps: int, queue: multiprocessing.SimpleQueue) -> None:
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(number)}
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    directory = RunDirectory(run)
    place = RankIdentity(number, RANKS, number, JOB.parent)
    trainer = Trainer(build(directory, place, Recorder.from_environment(directory), LedgerClock()))
    trainer._begin(None)
    trainer.timer.begin()
    step = bare_loop(trainer.parts.job, trainer.parts.ranks.layout.micro_batch)
    for _ in range(3):
        trainer._train_step()
        step()
    for _ in range(rounds):
        ours, bare = seconds_of(trainer._train_step, steps), seconds_of(step, steps)
        if number == 0:
            queue.put((ours, bare))
    dist.barrier()
    dist.destroy_process_group()


def seconds_of(step: Callable[[], object], steps: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    dist.barrier()
    return (time.perf_counter() - start) / steps


class Layer(nn.Module):
    """A typical implementation of a Llama layer."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.kv_heads * shape.head_dim
        self.norm1, self.norm2 = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
        self.q = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k, self.v = (nn.Linear(shape.hidden, width, bias=False) for _ in range(2))
        self.o = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.gate, self.up = (nn.Linear(shape.hidden, shape.ffn_hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.ffn_hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        rows, sequence, _ = x.shape
        normed = self.norm1(x)
        parts = []
        for layer, heads in ((self.q, self.shape.heads), (self.k, self.shape.kv_heads), (self.v, self.shape.kv_heads)):
            parts.append(layer(normed).view(rows, sequence, heads, self.shape.head_dim).transpose(1, 2))
        query, key = (turn(part, cosine, sine) for part in parts[:2])
        repeats = self.shape.heads // self.shape.kv_heads
        key, value = key.repeat_interleave(repeats, 1), parts[2].repeat_interleave(repeats, 1)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(rows, sequence, -1))
        normed = self.norm2(x)
        return x + self.down(silu(self.gate(normed)) * self.up(normed))


class Model(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cosine, sine)
        return self.head(self.norm(x))


def turn(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


def bare_loop(job: Job, micro_batch: int) -> Callable[[], None]:
    shape, sequence = job.model_shape, job.sequence
    assert shape is not None
    count = job.global_batch_sequences // RANKS
    model = Model(shape)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    frequencies = 1e4 ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
    angles = torch.outer(torch.arange(sequence), frequencies)
    cosine, sine = angles.cos(), angles.sin()
    tokens = torch.randint(0, shape.vocab, (count, sequence + 1))

    def step() -> None:
        for part in tokens.split(micro_batch):
            logits = model(part[:, :-1], cosine, sine)
            loss = cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
            (loss * part.shape[0] / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main()
