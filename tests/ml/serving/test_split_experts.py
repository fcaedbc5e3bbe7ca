"""Experts split over ranks: the numbers of one rank, with a share of the memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gang import Gang
from served_ranks import (
    hidden,
    hidden_after_sleep,
    hidden_in_fp8,
    hidden_of_parts,
    parameters_of,
    random_model,
    save_random,
)

from craton.job.model import ModelShape
from craton.ml.models import DecoderConfig
from craton.ml.models.config import RoutingConfig

SHAPE = ModelShape("mixture", 2, 64, 96, 4, 4, 16, 128, experts=8, top_k=3, moe_ffn_hidden=32)
MIXTURE = DecoderConfig(SHAPE)
SHARING = DecoderConfig(
    replace(SHAPE, shared_experts=1, dense_layers=1),
    routing=RoutingConfig(scoring="sigmoid", groups=4, top_groups=2, routed_scale=2.5),
)
# Rows of 60 bytes: the grouped matmul takes multiples of 16.
UNALIGNED = DecoderConfig(replace(SHAPE, moe_ffn_hidden=15))
TOKENS = torch.randint(0, 128, (2, 24), generator=torch.Generator().manual_seed(0))
FEW = TOKENS[:1, :4]  # whose experts are not on all ranks

PROCESSOR = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="on a CPU torch 2.11 multiplies fp8 with one scale a tensor only"
)


def test_any_split_gives_the_numbers_of_one_rank(gang: Gang) -> None:
    cases = [(MIXTURE, 2), (SHARING, 2), (SHARING, 4), (UNALIGNED, 4)]
    batches = [TOKENS, FEW]
    others: dict[str, set[int]] = {}
    for found in gang.run(hidden_of_parts, cases, batches, ranks=4):
        for (config, ep), (own, beside, *got) in zip(cases, found, strict=True):
            whole = random_model(config)
            assert own == parameters_of(whole)[0] // ep
            others.setdefault(str(config), set()).add(beside)
            for tokens, states in zip(batches, got, strict=True):
                torch.testing.assert_close(states, hidden(whole, tokens), rtol=1e-4, atol=1e-4)
    assert {len(sizes) for sizes in others.values()} == {1}, "ep changes nothing but routed experts"


def test_split_experts_come_back_from_sleep(gang: Gang) -> None:
    wanted = hidden(random_model(MIXTURE), TOKENS)
    for got, kept in gang.run(hidden_after_sleep, MIXTURE, 2, TOKENS, ranks=2):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
        assert kept == 0


@PROCESSOR
def test_ranks_quantize_their_own_experts(gang: Gang, tmp_path: Path) -> None:
    folder = str(save_random(tmp_path / "model", MIXTURE))
    for tokens in (TOKENS, FEW):
        whole, split = (gang.run(hidden_in_fp8, folder, tokens, ep, ranks=2) for ep in (1, 2))
        assert torch.equal(*split)
        # Beside the experts both have the same shards; in their rows nothing is cut, so their scales are equal too.
        torch.testing.assert_close(split[0], whole[0], rtol=1e-4, atol=1e-4)
