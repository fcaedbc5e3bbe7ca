"""Context parallel trains the same model: every kind of attention on 2 and 4 ranks, alone and with other dimensions."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gang import Gang
from tiny import SEQUENCE, VOCABULARY, Text, make_trainer, silenced, tiny_job
from torch.utils._python_dispatch import TorchDispatchMode

from craton.job.layout import Layout
from craton.job.model import MlaShape, ModelShape
from craton.ml.collectives import Peers
from craton.ml.data.sample import Sample
from craton.ml.kernels import ContextSlice
from craton.ml.models import Decoder, DecoderConfig, rope_tables
from craton.ml.models.decoder import Block
from craton.ml.models.rope import RopeConfig
from craton.ml.training import Batch
from craton.ml.training.batch import IGNORED, BatchError
from craton.ml.training.parallel import make_ranks

STEPS = 4
TOLERANCE = 1e-5  # relative, of every loss and every gradient norm

SIZES: Any = (2, 32, 64, 4, 2, 8, VOCABULARY)
MODELS = {
    "grouped": ModelShape("grouped", *SIZES, tied_embeddings=True),
    "sliding": ModelShape("sliding", *SIZES, sliding_window=10, sliding_layers=1, qk_norm=True),
    "latent": ModelShape("latent", *SIZES, mla=MlaShape(q_lora=16, kv_lora=16, qk_nope=8, qk_rope=4, v_head=12)),
    "narrow": ModelShape("narrow", *SIZES, mla=MlaShape(q_lora=0, kv_lora=16, qk_nope=8, qk_rope=4, v_head=6)),
}


class OneDocument(Text):
    """Rows without boundaries."""

    def sample(self, index: int) -> Sample:
        packed = super().sample(index)
        follows = np.where(packed.labels == IGNORED, 0, packed.labels)
        return Sample(packed.tokens, follows, np.arange(SEQUENCE), np.ones(SEQUENCE, dtype=np.float32))


def curve(model: str, sizes: dict[str, Any], packed: bool = True, silent: str | None = None) -> list[list[float]]:
    """Losses, gradient norms and the losses of evaluations, as rank 0 records them."""
    layout = Layout(**{"precision": "fp32", **sizes})
    job = tiny_job(STEPS, evaluate="{every_steps: 3, sequences: 6}")
    config = DecoderConfig(MODELS[model], initializer_range=0.1)
    source = Text() if packed else OneDocument()
    trainer, records = make_trainer(job, layout, source=source, config=config, validation=source)
    if silent is not None:
        context = trainer.parts.ranks.connections.context
        assert context is not None
        with silenced(context, silent):
            trainer.fit()
    else:
        trainer.fit()
    evaluated = [
        each["run_evaluation_loss"] for each in records.metrics_by_step.values() if "run_evaluation_loss" in each
    ]
    return [list(records.losses.values()), list(records.norms.values()), evaluated]


@cache
def expected(model: str, packed: bool = True) -> list[list[float]]:
    """The same in one process."""
    return curve(model, {"micro_batch": 2}, packed)


def assert_equal(found: list[list[float]], wanted: list[list[float]]) -> None:
    for mine, whole in zip(found, wanted, strict=True):
        assert mine == pytest.approx(whole, rel=TOLERANCE)


CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "cp 2": ("grouped", {"cp": 2, "micro_batch": 2}, True),
    "cp 2, one document a row": ("grouped", {"cp": 2, "micro_batch": 2}, False),
    "cp 4, selective recompute": ("grouped", {"cp": 4, "micro_batch": 4, "recompute": "selective"}, False),
    "cp 2 · fsdp 2, window": ("sliding", {"cp": 2, "fsdp": 2, "micro_batch": 2, "recompute": "full"}, True),
    "replicate 2 · cp 2, window without documents": ("sliding", {"cp": 2, "replicate": 2, "micro_batch": 2}, False),
    "cp 2 · tp 2": ("grouped", {"cp": 2, "tp": 2, "micro_batch": 2}, True),
    "narrow values, cp 2": ("narrow", {"cp": 2, "micro_batch": 2}, True),
    "latent, cp 4, selective recompute": ("latent", {"cp": 4, "micro_batch": 4, "recompute": "selective"}, False),
    "latent, cp 2 · fsdp 2": ("latent", {"cp": 2, "fsdp": 2, "micro_batch": 2, "recompute": "full"}, True),
    "latent, cp 2": ("latent", {"cp": 2, "micro_batch": 2, "recompute": "selective"}, True),
    "cp 2, window": ("sliding", {"cp": 2, "micro_batch": 2, "recompute": "full"}, True),
    "latent, cp 2 · tp 2": ("latent", {"cp": 2, "tp": 2, "micro_batch": 2, "recompute": "selective"}, True),
}
SLOW = ("cp 2, one document a row", "narrow values, cp 2", "cp 2, window")


# Layouts of four ranks are also tried, each with a deeper model, by test_every_layout.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if Layout(**sizes).world > 2 or name in SLOW else ())
        for name, (_, sizes, _) in CASES.items()
    ],
)
def test_a_context_group_trains_as_one_process_does(gang: Gang, name: str) -> None:
    model, sizes, packed = CASES[name]
    found = gang.run(curve, model, sizes, packed, ranks=Layout(**sizes).world)[0]
    losses, norms, evaluated = found
    assert (len(losses), len(norms), len(evaluated)) == (STEPS, STEPS, 2)
    assert_equal(found, expected(model, packed))


@pytest.mark.parametrize("operation", ["start_gather", pytest.param("start_scatter_sum", marks=pytest.mark.slow)])
def test_without_the_other_ranks_it_goes_wrong(gang: Gang, operation: str) -> None:
    found = gang.run(curve, "grouped", {"cp": 2, "micro_batch": 2}, True, operation)[0]
    with pytest.raises(AssertionError):
        assert_equal(found, expected("grouped"))


def dynamic_rope() -> bool:
    """Whether this rank turns its positions as one process would: by the length of the whole sequence."""
    context = Peers(dist.group.WORLD)
    place = ContextSlice(context.rank, context.size)
    config = RopeConfig(scaling="dynamic", factor=4.0, original_sequence=8)
    positions = torch.arange(SEQUENCE).expand(2, -1)
    found = rope_tables(place.cut(positions), 8, config, context=context)
    return all(
        torch.equal(mine, place.cut(whole))
        for mine, whole in zip(found, rope_tables(positions, 8, config), strict=True)
    )


def test_rotation_that_depends_on_the_length_takes_that_of_the_whole_sequence(gang: Gang) -> None:
    assert gang.run(dynamic_rope) == [True, True]


class Counted(TorchDispatchMode):
    """How often each operation runs, and how wide what is gathered is."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.gathered_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        name = function._schema.name.partition("::")[2]
        self.calls[name] += 1
        if name == "all_gather_into_tensor":
            self.gathered_bytes += result.nbytes
        return result


def count_operations(model: str) -> tuple[tuple[Counter[str], int], ...]:
    """Of the attention of the first layer, forwards and backwards."""
    torch.manual_seed(0)
    ranks = make_ranks(Layout(cp=2), torch.device("cpu"), dist.get_rank(), 2)
    decoder = Decoder(DecoderConfig(MODELS[model]))
    attention = cast("Block", decoder.blocks[0]).attention
    for module in attention.modules():
        if hasattr(module, "connections"):
            module.connections = ranks.connections
    positions = torch.arange(8).expand(2, -1)
    x = torch.randn(2, 8, 32, requires_grad=True)
    with Counted() as forward:
        out = attention(x, decoder.rope(positions))
    with Counted() as backward:
        out.sum().backward()
    return (forward.calls, forward.gathered_bytes), (backward.calls, backward.gathered_bytes)


@pytest.mark.parametrize(("model", "gathers", "width"), [("grouped", 2, 2 * 2 * 8), ("latent", 1, 16 + 4)])
def test_a_rank_keeps_its_own_keys_and_gathers_again(gang: Gang, model: str, gathers: int, width: int) -> None:
    """Keys and values of all heads, or the latents they are made of, twice; attention itself once."""
    for (forward, forward_bytes), (backward, backward_bytes) in gang.run(count_operations, model):
        assert forward["all_gather_into_tensor"] == backward["all_gather_into_tensor"] == gathers
        assert forward_bytes == backward_bytes == 2 * 16 * width * 4  # rows, sequence, fp32
        assert (forward["reduce_scatter_tensor"], backward["reduce_scatter_tensor"]) == (0, gathers)
        kernel = "_scaled_dot_product_flash_attention_for_cpu"
        parts = forward[kernel]
        assert parts in (3, 4), "two pieces on themselves, and what is before them"
        assert (backward[kernel], backward[f"{kernel}_backward"]) == (0, parts)


def tensors(count: int, sequence: int) -> dict[str, np.ndarray]:
    names = ("tokens", "labels", "positions", "weight")
    return {
        name: np.arange(count * sequence).reshape(count, sequence) + 1000 * index for index, name in enumerate(names)
    }


def peers(rank: int, size: int) -> Any:
    return mock.Mock(spec=Peers, rank=rank, size=size)


def test_a_batch_is_cut_into_an_early_and_a_late_piece() -> None:
    documents = np.array([[0, 0, 0, 1, 1, 1, 1, 1]] * 2, dtype=np.int32)
    extra = {"advantage": np.ones((2, 8, 3)), "reward": np.ones(2)}
    batch = Batch.from_arrays({**tensors(2, 8), "documents": documents, **extra})
    parts = [batch.cut(peers(rank, 2)) for rank in range(2)]
    assert parts[0].tokens.tolist() == [[0, 1, 6, 7], [8, 9, 14, 15]]
    assert parts[1].tokens.tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert (parts[1].labels - parts[1].tokens).unique().tolist() == [1000]
    assert parts[0].extra["advantage"].shape == (2, 4, 3)
    assert parts[0].extra["reward"].shape == (2,)
    assert parts[0].documents is not None
    assert parts[0].documents.numbers.shape == (2, 8)
    assert sum(part.count for part in parts) == batch.count
    assert batch.cut(None) is batch


def test_a_sequence_that_does_not_divide_is_refused_with_what_to_do() -> None:
    batch = Batch.from_arrays(tensors(1, 6))
    with pytest.raises(BatchError, match=r"2·cp = 4 pieces, but 6 tokens are not .* multiple of 4"):
        batch.cut(peers(0, 2))
