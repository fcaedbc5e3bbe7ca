"""How long a chat may think: the fields of a request that limit it, under the names that clients send.

`thinking_token_budget` is vLLM's name, `thinking_budget` and `enable_thinking` are Qwen's, `reasoning_effort` is
OpenAI's. A budget is a hard limit: after exactly so many tokens the server closes the thinking and the answer follows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from craton.ml.serving.server.errors import BadRequestError
from craton.ml.serving.server.http_service import HttpService
from craton.ml.serving.server.protocol import ChatRequest

# Tokens of thinking by effort, as Gemini's OpenAI-compatible API has them
# (https://ai.google.dev/gemini-api/docs/openai, 2025-12); xhigh has no limit.
EFFORT_TOKENS: dict[str, int | None] = {
    **{"none": 0, "minimal": 1024, "low": 1024, "medium": 8192, "high": 24_576},
    "xhigh": None,
}
CLOSING = "\n</think>\n\n"  # what the server writes when a budget is spent, as chat templates do


@dataclass(frozen=True)
class Thinking:
    """`budget`: None: no limit. `options`: variables for the chat template. `ignored`: fields without effect here."""

    budget: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


def thinking_of(service: HttpService, request: ChatRequest, has_grammar: bool) -> Thinking:
    """Return how long the answer may think; BadRequestError for a budget that cannot be enforced."""
    given = {
        name: value
        for name in ("thinking_token_budget", "thinking_budget", "enable_thinking", "reasoning_effort")
        if (value := getattr(request, name)) is not None
    }
    if not given:
        return Thinking(options=request.chat_template_kwargs or {})
    explicit = _explicit_budget(request)
    is_parsed = service.settings.reasoning_style == "think" and not has_grammar
    if explicit is not None and not is_parsed:
        name, _ = explicit
        reason = (
            "cannot be combined with an output format or a forced tool call, which leave no thinking"
            if has_grammar
            else "needs a server that separates the thinking; start it with reasoning_parser: think"
        )
        raise BadRequestError(f"{name} {reason}", name)
    budget = None if explicit is None else explicit[1]
    if budget is None and request.enable_thinking is False:
        budget = 0
    if budget is None and request.reasoning_effort is not None:
        budget = EFFORT_TOKENS[request.reasoning_effort]
    known = "" if service.template is None else service.template.source
    wanted: dict[str, Any] = {"reasoning_effort": request.reasoning_effort, "enable_thinking": request.enable_thinking}
    if request.reasoning_effort == "none" and request.enable_thinking is None:
        wanted["enable_thinking"] = False
    options = {name: value for name, value in wanted.items() if value is not None and name in known}
    has_effect = set(options) | (set(given) if is_parsed else set())
    return Thinking(
        budget if is_parsed else None,
        {**options, **(request.chat_template_kwargs or {})},
        tuple(name for name in given if name not in has_effect),
    )


def _explicit_budget(request: ChatRequest) -> tuple[str, int] | None:
    """Return the budget that is given in tokens, with its field."""
    budgets = [
        (name, value)
        for name in ("thinking_token_budget", "thinking_budget")
        if (value := getattr(request, name)) is not None
    ]
    if len({value for _, value in budgets}) > 1:
        raise BadRequestError(
            f"thinking_token_budget {request.thinking_token_budget} and thinking_budget {request.thinking_budget} "
            "differ; give one of them",
            "thinking_token_budget",
        )
    if budgets and budgets[0][1] and request.enable_thinking is False:
        name, value = budgets[0]
        raise BadRequestError(f"{name} is {value}, and enable_thinking is false; give one of them", name)
    return budgets[0] if budgets else None
