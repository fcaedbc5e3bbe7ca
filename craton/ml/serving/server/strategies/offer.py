"""Which strategy a request gets: its own, else the server's default, within the server's bounds.

A request names verifiers only by the names of the job file. Everything else that it may write is plain, shallow and
short, so a strategy cannot bring code, paths or addresses, and parsing it costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from craton.errors import CratonError
from craton.job.sections.serving import Serve
from craton.job.sections.strategy import Strategy, StrategyBounds, parse_strategy
from craton.ml.serving.server.errors import BadRequestError
from craton.ml.serving.server.protocol import ChatRequest, CompletionRequest, GenerationRequest
from craton.ml.serving.server.strategies.scores import ServerVerifiers

OFF = "none"  # as the strategy of a request: none, although the server has a default
MAX_VALUES = 64  # of a strategy
MAX_CHARACTERS = 512  # of a text in it, such as a pattern
MAX_LEVELS = 3
STRATEGY_KEYS = {"kind", *(key for kind in get_args(Strategy) for key in kind.model_fields)}
FORBIDDEN = ("python", "code", "sandbox", "verify", "verifier", "verifiers", "endpoint", "url", "path", "model")


@dataclass(frozen=True)
class StrategyOffer:
    """What a server offers."""

    default: Strategy | None = None
    bounds: StrategyBounds = field(default_factory=StrategyBounds)
    verifiers: ServerVerifiers = field(default_factory=lambda: ServerVerifiers(Serve()))

    def of_request(self, request: GenerationRequest) -> Strategy | None:
        """Return the strategy of a request, None for an ordinary answer. BadRequestError names the invalid field."""
        given = request.strategy
        if given is None:
            return None if self.default is None or _conflict(request) else self.bounds.bound(self.default)
        if _is_off(given):
            return None
        _check_plain(given)
        try:
            strategy = self.bounds.bound(parse_strategy(given, scores=self.verifiers.names))
        except CratonError as error:
            raise BadRequestError(str(error), _field_of(str(error)), "invalid_strategy") from None
        except (RecursionError, OverflowError) as error:  # of a pattern
            raise BadRequestError(f"strategy.answer: {error}", "strategy.answer", "invalid_strategy") from None
        if strategy.max_dollars is not None:
            raise BadRequestError(
                "strategy.max_dollars: this server has no prices; use max_tokens", "strategy.max_dollars"
            )
        if conflict := _conflict(request):
            name, reason = conflict
            raise BadRequestError(f"{name} cannot be combined with a strategy: {reason}", name)
        return strategy


def wanted_strategy(offer: StrategyOffer, request: GenerationRequest) -> Strategy | None:
    """Return the strategy of a request, and check what belongs to it."""
    strategy = offer.of_request(request)
    if request.verifier_row is not None and (strategy is None or strategy.verifier is None):
        raise BadRequestError(
            "verifier_row has what a verifier compares with, and the request uses none; give strategy.score, or omit "
            "it",
            "verifier_row",
        )
    name = None if strategy is None else strategy.verifier
    if name is not None and (reason := offer.verifiers.refusal(name, request.verifier_row or {})):
        raise BadRequestError(f"verifier_row: {reason}", "verifier_row", "invalid_strategy")
    if name in offer.verifiers.reward_models and shown_prompt(request) is None:
        raise BadRequestError(
            f"prompt has token ids, and the reward model {name} scores texts; send the prompt as text", "prompt"
        )
    return strategy


def shown_prompt(request: GenerationRequest) -> str | list[dict[str, Any]] | None:
    """Return the prompt as verifiers see it: a text or messages; None for token ids."""
    if isinstance(request, ChatRequest):
        return [message.model_dump(exclude_unset=True) for message in request.messages]
    assert isinstance(request, CompletionRequest)
    prompts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    first = prompts[0] if prompts else None
    return first if isinstance(first, str) else None


def open_offer(
    serve: Mapping[str, Any], code_folder: Path | None = None, model_folder: Path | None = None
) -> StrategyOffer:
    """Return the offer of a `serve:` section, and start its verifiers. `code_folder`: with users' functions;
    `model_folder`: of the served model."""
    section = Serve.model_validate(serve)
    verifiers = ServerVerifiers(section, code_folder, model_folder)
    return StrategyOffer(section.strategy, section.strategies, verifiers)


def _conflict(request: GenerationRequest) -> tuple[str, str] | None:
    """Return the field that no strategy goes with, and why."""
    chosen = "give one answer, which it chooses from its samples"
    conflicts: dict[str, tuple[bool, str]] = {
        "n": (request.n > 1, f"n is {request.n}; {chosen} (strategy.n)"),
        "continue_from": (bool(request.continue_from), "it begins its samples itself"),
        "prompt_logprobs": (request.prompt_logprobs is not None, "send them without one"),
        "max_tokens": (request.max_tokens == 0, "it samples at least one token"),
    }
    if isinstance(request, ChatRequest):
        budget = next((name for name in ("thinking_token_budget", "thinking_budget") if getattr(request, name)), "")
        conflicts |= {
            "tools": (bool(request.tools) and request.tool_choice != "none", "calls of tools cannot be compared"),
            "logprobs": (request.logprobs, "the answer is chosen, not sampled"),
            budget: (bool(budget), 'use {"kind": "budget", "at_most": N} for a budget'),
        }
    elif isinstance(request, CompletionRequest):
        prompts = request.prompt
        is_many = not isinstance(prompts, str) and bool(prompts) and not isinstance(prompts[0], int)
        conflicts |= {
            "prompt": (is_many and len(prompts) > 1, "send one prompt per request"),
            "echo": (request.echo, "send it without echo"),
            "logprobs": (request.logprobs is not None, "the answer is chosen, not sampled"),
        }
    return next(((name, reason) for name, (is_given, reason) in conflicts.items() if is_given), None)


def _is_off(given: object) -> bool:
    return given == OFF or (isinstance(given, Mapping) and dict(given) == {"kind": OFF})


def _check_plain(given: object) -> None:
    """Raise for a strategy that is deep or long, or has a key that only a job file may have."""
    values: list[tuple[str, object, int]] = [("strategy", given, 0)]
    num_values = 0
    while values:
        name, value, level = values.pop()
        num_values += 1
        if level > MAX_LEVELS or num_values > MAX_VALUES:
            raise BadRequestError(
                f"strategy has more than {MAX_LEVELS} levels or {MAX_VALUES} values; strategies do not nest",
                "strategy",
                "invalid_strategy",
            )
        if isinstance(value, str) and len(value) > MAX_CHARACTERS:
            raise BadRequestError(
                f"{name[:100]} has {len(value):,} characters; the maximum is {MAX_CHARACTERS}",
                _parameter(name),
                "invalid_strategy",
            )
        if isinstance(value, Mapping):
            for key, inner in value.items():
                if key in FORBIDDEN:
                    raise BadRequestError(
                        f"{name}.{key}: a request names a verifier of the server by strategy.score; only the job file "
                        f"has {key}",
                        _parameter(f"{name}.{key}"),
                        "invalid_strategy",
                    )
                values.append((f"{name}.{str(key)[:64]}", inner, level + 1))
        elif isinstance(value, list):
            values += [(name, inner, level + 1) for inner in value]


def _field_of(message: str) -> str:
    """Return the field that a message begins with: `strategy.n: …`, or `strategy: n 5 …`."""
    name, _, rest = message.partition(": ")
    key = rest.partition(" ")[0].rstrip(":")
    return _parameter(f"strategy.{key}" if name == "strategy" and key in STRATEGY_KEYS else name)


def _parameter(name: str) -> str:
    return name[:64] if name.startswith("strategy") else "strategy"
