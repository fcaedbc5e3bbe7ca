"""What an endpoint can give, and what a request asks for: compared before anything is started."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from craton.ml.serving.clients.errors import MissingCapabilityError
from craton.ml.serving.messages import Sampling
from craton.nearest import did_you_mean

if TYPE_CHECKING:
    from craton.ml.serving.clients.answer import InferenceRequest

USE_OURS = "use a Craton server (ServerClient)"
# Fields of Sampling that OpenAI's API does not have; grammar and log-probabilities are listed by themselves.
EXTENDED_FIELDS = ("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_tokens", "ignore_eos")


@dataclass(frozen=True)
class Capabilities:
    """What an endpoint gives."""

    text_prompts: bool = False
    chat_prompts: bool = False
    token_prompts: bool = False
    token_ids: bool = False  # of the answer
    logprobs: bool = False  # of the sampled tokens
    sampled_logprobs: bool = False  # those of the distribution that was sampled, after temperature and penalties
    alternatives: bool = False  # log-probabilities of other tokens
    prompt_logprobs: bool = False
    seeds: bool = False  # the same request with the same seed gives the same answer
    stop_strings: bool = False
    extended_sampling: bool = False  # EXTENDED_FIELDS and priority
    grammars: bool = False
    adapters: bool = False
    continued_requests: bool = False  # `generated`: an answer goes on as if it had never been interrupted
    continued_chats: bool = False  # `continues_message`
    continued_whitespace: bool = False  # likewise, with the white space at the end of the message
    shared_forks: bool = False  # branches share the KV cache; otherwise a fork is a new request with a longer prompt
    weights_versions: bool = False

    def missing(self, names: set[str]) -> list[str]:
        return [field.name for field in fields(self) if field.name in names and not getattr(self, field.name)]


REMEDIES = {
    "text_prompts": "send token ids, or give the client a tokenizer folder",
    "chat_prompts": "send a text, or token ids",
    "token_prompts": "send the prompt as text",
    "token_ids": f"{USE_OURS}, vLLM or SGLang",
    "logprobs": f"set sampling.logprobs to None, or {USE_OURS}",
    "sampled_logprobs": (
        "sample from the model's own distribution (temperature 1, no penalties, no truncation), start vLLM with "
        f"--logprobs-mode processed_logprobs, or {USE_OURS}"
    ),
    "alternatives": "set sampling.logprobs to 0, or use an engine in this process (EngineClient)",
    "prompt_logprobs": "set sampling.prompt_logprobs to None, or use an engine in this process (EngineClient)",
    "seeds": f"set sampling.seed to None, or {USE_OURS}",
    "stop_strings": "set sampling.stop_tokens, or give the client a tokenizer folder",
    "extended_sampling": f"leave {', '.join(EXTENDED_FIELDS)} and priority at their defaults, or {USE_OURS}",
    "grammars": f"set sampling.grammar to None, or {USE_OURS} with a tokenizer",
    "adapters": "name the adapter as the client's model",
    "continued_requests": f"send the answer so far as part of the prompt, or {USE_OURS}",
    "continued_chats": f"send the chat as a text, or {USE_OURS}, vLLM or SGLang",
    "continued_whitespace": f"end the message without white space, send the chat as a text, or {USE_OURS}",
    "shared_forks": f"accept that a fork is a new request, or {USE_OURS}",
    "weights_versions": USE_OURS,
}
assert set(REMEDIES) == {field.name for field in fields(Capabilities)}


def needs_of(request: InferenceRequest) -> set[str]:
    """Return the capabilities that a request asks for."""
    sampling, plain = request.sampling, Sampling()
    needs = {f"{request.prompt_kind}_prompts"}
    asked = {
        "logprobs": sampling.logprobs is not None,
        "sampled_logprobs": sampling.logprobs is not None
        and sampling.logprobs_mode == "sampled"
        and changes_distribution(sampling),
        "alternatives": bool(sampling.logprobs),
        "prompt_logprobs": sampling.prompt_logprobs is not None,
        "seeds": sampling.seed is not None,
        "stop_strings": bool(request.stop),
        "extended_sampling": bool(request.priority)
        or any(getattr(sampling, name) != getattr(plain, name) for name in EXTENDED_FIELDS),
        "grammars": sampling.grammar is not None,
        "adapters": request.adapter is not None,
        "continued_requests": bool(request.generated),
        "continued_chats": request.continues_message,
    }
    return needs | {name for name, is_asked in asked.items() if is_asked}


def rollout_capabilities(temperature: float) -> tuple[str, ...]:
    """Return what an endpoint must give if its answers are trained on: text is never tokenized again."""
    needed = ("token_prompts", "token_ids", "logprobs")
    return needed if temperature == 1 else (*needed, "sampled_logprobs")


def changes_distribution(sampling: Sampling) -> bool:
    """Whether tokens are samples of another distribution than the model's own. (At temperature 0 both modes of
    log-probabilities are the model's.)"""
    plain = Sampling()
    names = ("top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens")
    is_changed = any(getattr(sampling, name) != getattr(plain, name) for name in names)
    is_changed |= bool(sampling.logit_bias) or sampling.grammar is not None or sampling.temperature != 1.0
    return sampling.temperature > 0 and is_changed


def check_capabilities(endpoint: str, capabilities: Capabilities, names: set[str]) -> None:
    """Raise MissingCapabilityError for the first of these that is missing, with the number of others."""
    if unknown := sorted(names - set(REMEDIES)):
        known = ", ".join(REMEDIES)
        raise ValueError(f"no capability {unknown[0]!r}; there are {known}{did_you_mean(unknown[0], REMEDIES)}")
    missing = capabilities.missing(names)
    if not missing:
        return
    listed = ", ".join(name.replace("_", " ") for name in missing)
    raise MissingCapabilityError(f"{endpoint} does not give {listed}; {REMEDIES[missing[0]]}")
