"""One real step on live ranks with every collective counted where Python asks for it, without the trace's own code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch.distributed as dist
from tiny import make_trainer
from torch import Tensor
from torch.distributed import distributed_c10d

from craton.job import Job, parse_job
from craton.job.layout import Layout
from craton.ml.collectives import Peers
from craton.ml.models import config_from_shape

MICRO_BATCHES = 6  # more than a trace runs, as the models have more layers: what it concludes is tested too

MODELS = {
    "dense": "{layers: 6, hidden: 64, ffn_hidden: 128, heads: 4, kv_heads: 2, vocab: 256}",
    "experts": (
        "{layers: 7, hidden: 64, ffn_hidden: 128, heads: 4, kv_heads: 2, vocab: 256, experts: 8, top_k: 2, "
        "moe_ffn_hidden: 64, shared_experts: 1, dense_layers: 1}"
    ),
    "latents": (
        "{layers: 6, hidden: 64, ffn_hidden: 128, heads: 4, kv_heads: 4, vocab: 256, "
        "mla: {q_lora: 32, kv_lora: 32, qk_nope: 16, qk_rope: 16, v_head: 16}}"
    ),
}

Counts = dict[tuple[str, int], tuple[int, int]]  # (operation, ranks of the group) → (calls, bytes)


def small_job(layout: Layout, model: str = "dense", micro_batches: int = MICRO_BATCHES, lora: str = "") -> Job:
    batch = layout.data_parallel * layout.micro_batch * micro_batches
    return parse_job(
        f"""
        name: small
        kind: pretrain
        model: {MODELS[model]}
        data: {{sequence: 32}}
        train: {{global_batch_sequences: {batch}, steps: 4, precision: {layout.precision}, {lora}}}
        cluster: local
        """
    )


def counted_step(sizes: dict[str, Any], model: str = "dense") -> Counts:
    """What this rank asked of the process groups in one step."""
    layout = Layout(**sizes)
    job = small_job(layout, model)
    shape = job.model_shape
    assert shape is not None
    with mock.patch("tiny.GLOBAL_BATCH", job.global_batch_sequences):
        trainer, _ = make_trainer(job, layout, config=config_from_shape(shape))
        trainer._begin(None)
        batches = trainer._load()
    counter = Counter()
    with counter.patches():
        count, _ = trainer._agree(batches)
        loss, report = trainer._forward_backward(batches, count)
        trainer._update(1e-4, loss, report)
    assert trainer.loader is not None
    trainer.loader.close()
    return counter.counts


class Counter:
    """Stands in front of every function that starts a collective; one that calls another counts once."""

    def __init__(self) -> None:
        self.counts: Counts = {}
        self._inside = False

    def patches(self) -> ExitStack:
        stack = ExitStack()
        functions = {
            "all_gather_into_tensor": "all_gather",
            "all_gather_single": "all_gather",
            "reduce_scatter_tensor": "reduce_scatter",
            "reduce_scatter_single": "reduce_scatter",
            "all_reduce": "all_reduce",
            "all_to_all_single": "all_to_all",
            "broadcast": "broadcast",
            "isend": "send",
            "irecv": "recv",
            "send": "send",
            "recv": "recv",
        }
        for name, operation in functions.items():
            if hasattr(dist, name):
                counted = self._counted(getattr(dist, name), operation)
                for module in (dist, distributed_c10d):
                    stack.enter_context(mock.patch.object(module, name, counted))
        for name, operation in (
            ("start_gather", "all_gather"),
            ("start_scatter_sum", "reduce_scatter"),
            ("start_exchange", "all_to_all"),
            ("start_sum", "all_reduce"),
        ):
            stack.enter_context(mock.patch.object(Peers, name, self._counted(getattr(Peers, name), operation)))
        return stack

    def _counted(self, function: Callable[..., Any], operation: str) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            if self._inside:
                return function(*arguments, **options)
            given = [*arguments, *options.values()]
            group = next((each for each in given if isinstance(each, dist.ProcessGroup)), None)
            peers = next((each for each in given if isinstance(each, Peers)), None)
            group = group if peers is None else peers.group
            before = peers and peers.group._get_sequence_number_for_group()
            self._inside = True
            try:
                result = function(*arguments, **options)
            finally:
                self._inside = False
            if peers and peers.group._get_sequence_number_for_group() == before:
                return result  # recompute had kept it: the group was not asked
            tensors = [each for each in (*given, result) if isinstance(each, Tensor)]
            size = max(tensor.numel() * tensor.element_size() for tensor in tensors)
            if dist.get_world_size(group) == 1:
                return result
            key = (operation, dist.get_world_size(group))
            calls, total = self.counts.get(key, (0, 0))
            self.counts[key] = (calls + 1, total + size)
            return result

        return counted
