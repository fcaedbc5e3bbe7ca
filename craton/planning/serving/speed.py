"""Speed of one server where no load is stated: one request alone, and a number of them at once in a closed loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from craton.planning.fitting import Prediction
from craton.planning.serving.closed_load import ClosedLoad, closed_loop
from craton.planning.serving.own_engine import engine_constants, roofline_steps
from craton.planning.serving.profile import EngineProfile
from craton.planning.serving.step_times import ServedSteps
from craton.planning.serving.terms import ServingTerms


@dataclass(frozen=True)
class ServerSpeed:
    """Predictions, and minimum times of the same steps. As in the plan of a load, the residual of the time per token is
    that of every step."""

    single_token: Prediction  # seconds per token of one request in decode
    together_token: Prediction  # seconds of the server per generated token; prompts are computed beside decode
    together_tpot: Prediction  # seconds between the tokens of each of these requests
    first_token_seconds: float  # on an idle server
    prefill_tokens_per_second: float  # in full steps
    single_roof_seconds: float  # per token
    together_roof_seconds: float  # per token, without prompts
    bound: str  # the largest part of their decode step


def server_speed(
    terms: ServingTerms, profile: EngineProfile, requests: int, prompt_tokens: int, output_tokens: int
) -> ServerSpeed:
    """Predict requests of these lengths; of `requests` that run at once, the next one starts when one ends."""
    prompt, output = float(prompt_tokens), float(output_tokens)
    context = prompt + output / 2

    def steps_of(constants: Any) -> ServedSteps:
        return ServedSteps(terms, engine_constants(profile, constants))

    def loop(constants: Any) -> ClosedLoad:
        steps = steps_of(constants)
        return closed_loop(steps, float(requests), prompt, output, prefill_slowdown=steps.constants["prefill_slowdown"])

    def predict(seconds: Callable[[Any], Any]) -> Prediction:
        return profile.predict("tpot_seconds", seconds)

    steps = steps_of(profile.constants).scaled(profile.step_factor)
    minimum = roofline_steps(steps)
    parts = steps.terms(float(requests), context)
    chunk = float(steps.step_tokens)
    return ServerSpeed(
        single_token=predict(lambda each: steps_of(each).decode_seconds(1.0, context)),
        together_token=predict(lambda each: 1.0 / (loop(each).requests_per_second * output)),
        together_tpot=predict(lambda each: loop(each).tpot_seconds),
        first_token_seconds=profile["first_token_seconds"] * float(terms.first_token_factor)
        + float(steps.prefill_seconds(prompt)),
        prefill_tokens_per_second=chunk / float(steps.prompts_seconds(chunk, prompt)),
        single_roof_seconds=float(minimum.decode_seconds(1.0, context)),
        together_roof_seconds=float(minimum.decode_seconds(float(requests), context)) / requests,
        bound=max(parts, key=lambda name: float(parts[name])),
    )
