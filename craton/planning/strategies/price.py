"""What a problem costs: seconds and dollars on our own server, by the prices of an endpoint, or as it was measured.

Guarantees: pure functions of plain numbers; None where nothing is known, never a guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from craton import formatting
from craton.planning.serving import ServedSteps, ServePlan, plan_steps
from craton.planning.strategies.usage import PlannedUsage


@dataclass(frozen=True)
class ProblemPrice:
    """Cost of one problem; None: not known."""

    latency_seconds: float | None = None  # of one problem alone
    problems_per_hour: float | None = None
    concurrency: float | None = None  # problems whose KV cache fits at once
    dollars: float | None = None
    kv_bytes: float | None = None


class PriceModel(Protocol):
    """Where the cost of a problem comes from."""

    @property
    def source(self) -> str:
        """A sentence for the reader."""

    def price(self, usage: PlannedUsage) -> ProblemPrice: ...


@dataclass(frozen=True)
class NoPrice:
    """Nothing is known beside tokens."""

    source: str = "not known: name a job of kind serve (craton plan JOB --eval …), or --price IN,OUT per million tokens"

    def price(self, usage: PlannedUsage) -> ProblemPrice:
        return ProblemPrice()


@dataclass(frozen=True)
class EndpointPrice:
    """Dollars per million tokens. Every request pays its prompt."""

    prompt: float
    completion: float

    @property
    def source(self) -> str:
        prompt, completion = f"${self.prompt:g}", f"${self.completion:g}"
        return f"{prompt} per million prompt tokens, paid by every sample, {completion} per million completion tokens"

    def price(self, usage: PlannedUsage) -> ProblemPrice:
        tokens = (usage.prompt_tokens * usage.num_requests * self.prompt, usage.completion_tokens * self.completion)
        return ProblemPrice(dollars=sum(tokens) / 1e6)


@dataclass(frozen=True)
class MeasuredPrice:
    """Seconds and dollars per token as an evaluation measured them, for every strategy alike."""

    seconds_per_token: float | None
    dollars_per_token: float | None

    source = "as the evaluation measured per completion token, at its concurrency"

    def price(self, usage: PlannedUsage) -> ProblemPrice:
        tokens = usage.completion_tokens
        seconds = self.seconds_per_token * tokens if self.seconds_per_token else None
        dollars = self.dollars_per_token * tokens if self.dollars_per_token is not None else None
        return ProblemPrice(problems_per_hour=3600.0 / seconds if seconds else None, dollars=dollars)


@dataclass(frozen=True)
class ServerPrice:
    """A server of our own, as the serving plan has it: the prompt is computed once per problem."""

    plan: ServePlan

    @property
    def source(self) -> str:
        plan = self.plan
        hour = (
            f"{formatting.dollars(plan.dollars_per_hour)} per hour" if plan.dollars_per_hour is not None else "no price"
        )
        gpus = plan.cluster.instance.num_gpus
        hour += f" for the whole node, of which it uses {plan.tp} of {gpus} GPUs" if gpus > plan.tp else ""
        return f"the server of job {plan.job}: {plan.model.name} on {plan.cluster.name}, {plan.layout}, {hour}"

    def price(self, usage: PlannedUsage) -> ProblemPrice:
        plan = self.plan
        prefill = self._prefill_seconds(usage.prompt_tokens)
        context = usage.prompt_tokens + usage.branch_tokens / 2
        latency = prefill + usage.rounds_tokens * self._decode_seconds(max(1, round(usage.parallel)), context)
        concurrency = plan.kv_tokens / usage.kv_tokens
        dollars = rate = None
        if concurrency >= 1:
            batch = max(1, min(plan.max_running, int(concurrency * usage.parallel)))
            seconds = prefill + usage.completion_tokens * self._decode_seconds(batch, context) / batch
            rate = 3600.0 / seconds
            dollars = plan.dollars_per_hour / rate if plan.dollars_per_hour is not None else None
        return ProblemPrice(latency, rate, concurrency, dollars, usage.kv_tokens * plan.kv_bytes_per_token)

    @cached_property
    def _steps(self) -> ServedSteps:
        return plan_steps(self.plan)

    def _decode_seconds(self, batch: int, context: float) -> float:
        return float(self._steps.decode_seconds(float(batch), context))

    def _prefill_seconds(self, tokens: float) -> float:
        return float(self._steps.prefill_seconds(max(1.0, tokens)))
