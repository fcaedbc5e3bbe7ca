"""Small random models, ours and the same of transformers, and what transformers makes of a text."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from craton.ml.models import Decoder, config_from_huggingface, load_weights
from craton.ml.serving.messages import Alternatives, OutputDelta

VOCABULARY = 96
LONGEST = 256
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LONGEST,
    "initializer_range": 0.3,  # wide: texts that do not end in one token for ever
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "q_lora_rank": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
FAMILIES = ("llama", "qwen3", "mixtral", "deepseek_v3")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def their_model(family: str, seed: int | None = None, **others: Any) -> PreTrainedModel:
    """`others`: sizes other than SIZES."""
    torch.manual_seed(sum(map(ord, family)) if seed is None else seed)
    sizes = SIZES | others
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True)).eval()
    if family == "deepseek_v3":
        return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes | LATENT)).eval()
    return MixtralForCausalLM(
        MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    ).eval()


@cache
def pair(family: str) -> tuple[PreTrainedModel, Decoder]:
    """Their model and ours, with the same weights."""
    theirs = their_model(family)
    with TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = Decoder(config_from_huggingface(Path(folder)))
        load_weights(ours, folder)
    return theirs, ours.to(DEVICE)


@cache
def drafting(family: str, noise: float = 0.01) -> Decoder:
    """A draft model: ours with noise on all weights, which mostly chooses the same tokens."""
    draft = copy.deepcopy(pair(family)[1])
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator).to(parameter.device))
    return draft


@dataclass
class Answer:
    """All that a request got."""

    tokens: list[int]
    logprobs: list[float]
    alternatives: list[Alternatives]
    versions: list[int]
    last: OutputDelta | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[Alternatives | None] | None = None

    @classmethod
    def of(cls, pieces: list[OutputDelta]) -> Answer:
        answer = cls([], [], [], [])
        for piece in pieces:
            assert answer.last is None, "a piece after the last one"
            answer.tokens += piece.tokens
            answer.logprobs += piece.logprobs
            answer.alternatives += piece.alternatives
            answer.versions += piece.versions
            answer.cached_tokens += piece.cached_tokens
            answer.prompt_logprobs = piece.prompt_logprobs or answer.prompt_logprobs
            if piece.finish is not None:
                answer.last = piece
        return answer


@torch.no_grad()
def their_logprobs(model: PreTrainedModel, text: list[int]) -> torch.Tensor:
    """Log-probabilities of every next token after each place of a text, [tokens, vocabulary]."""
    return model(torch.tensor([text])).logits[0].float().log_softmax(-1)


def expect_greedy(model: PreTrainedModel, prompt: list[int], answer: Answer, tolerance: float = 2e-4) -> None:
    """That an answer is what their model finds likeliest, token for token, with the same log-probabilities."""
    logprobs = their_logprobs(model, prompt + answer.tokens)
    at = logprobs[len(prompt) - 1 : -1]
    assert answer.tokens == at.argmax(-1).tolist()
    expected = at.gather(-1, torch.tensor(answer.tokens).unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=tolerance, rtol=0)
