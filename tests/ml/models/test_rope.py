"""Frequencies agree with transformers for every scaling, and a configuration that cannot be followed is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from craton.job import ModelError
from craton.ml.models import rope_tables
from craton.ml.models.rope import RopeConfig, attention_scale, inverse_frequencies

_SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 8192},
    "yarn of DeepSeek": {
        "factor": 2.0,
        "original_max_position_embeddings": 8192,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "beta_fast": 16.0,
    },
    "yarn given": {
        "factor": 2.0,
        "original_max_position_embeddings": 8192,
        "attention_factor": 1.5,
        "truncate": False,
    },
}


@pytest.mark.parametrize("name", _SCALINGS)
@pytest.mark.parametrize("length", [100, 40_000])
def test_frequencies_equal_those_of_transformers(name: str, length: int) -> None:
    kind = name.split()[0]
    parameters = {"rope_type": kind, "rope_theta": 500_000.0, **_SCALINGS[name]}
    theirs = LlamaConfig(
        hidden_size=256, num_attention_heads=2, max_position_embeddings=16_384, rope_parameters=parameters
    )
    wanted, scale = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu", seq_len=length)
    config = RopeConfig.from_huggingface(theirs.to_dict())
    got = inverse_frequencies(128, config, longest=torch.tensor(length))
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0)
    assert attention_scale(config) == pytest.approx(scale)
    old = {
        "rope_theta": 500_000.0,
        "rope_scaling": {"type": kind, **_SCALINGS[name]},
        "max_position_embeddings": 16_384,
    }
    assert RopeConfig.from_huggingface(old) == config


def test_tables_follow_positions_not_places() -> None:
    config = RopeConfig(theta=100.0)
    cosine, sine = rope_tables(torch.tensor([[0, 1, 2], [7, 0, 2]]), 8, config)
    assert cosine.shape == sine.shape == (2, 3, 4)
    assert cosine.dtype is torch.float32
    assert torch.equal(cosine[0, 2], cosine[1, 2])
    assert torch.equal(cosine[0, 0], torch.ones(4))
    torch.testing.assert_close(sine[1, 0], torch.sin(7 * 100.0 ** (-torch.arange(4) / 4)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            "rope_type 'longrope' is not supported; allowed: ",
        ),
        ({"rope_scaling": {"type": "linear"}}, "'factor' is None; must be a number"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "needs original_max_position_embeddings"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1.0}, "sliding_attention": {"rope_theta": 2.0}}},
            "differ",
        ),
        ({"rope_parameters": "linear"}, "must be a mapping"),
    ],
)
def test_what_cannot_be_followed_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        RopeConfig.from_huggingface(fields)
