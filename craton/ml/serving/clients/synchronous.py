"""Answers of an engine in this process, without threads and event loop: the same requests, the same steps.

All requests are submitted before the first step, and stop strings end an answer between two steps. So the batch of
every step, and on a CPU every bit, is a function of weights and requests alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from craton.ml.serving.clients.answer import Answer, AnswerDelta, InferenceRequest
from craton.ml.serving.clients.engine_client import DrivenEngine, request_numbers
from craton.ml.serving.clients.engine_texts import ENDPOINT, EngineTexts, answer_delta
from craton.ml.serving.clients.errors import EndpointUnavailableError, InferenceError, RequestRefusedError
from craton.ml.serving.messages import Abort, OutputDelta, Submit, seed_of_copy
from craton.ml.serving.text import AnswerReader


class ResettableEngine(DrivenEngine, Protocol):
    """What synchronous generation needs of an engine beside the needs of a client."""

    @property
    def is_idle(self) -> bool: ...
    def reset(self) -> None: ...


def generate(
    engine: ResettableEngine,
    requests: Sequence[InferenceRequest],
    texts: EngineTexts,
    keeps_cache: bool = False,
    check: Callable[[], None] | None = None,
) -> list[list[Answer]]:
    """Return the finished answers to each request, in their order; the first error ends all of them.

    `keeps_cache`: reuse the prefix cache of earlier calls, for the next turns of a conversation. The steps then depend
    on these calls, too. The weights' versions still differ, so nothing of older weights is used. `check` is called
    before every step; what it raises ends all requests."""
    if not engine.is_idle:
        raise RequestRefusedError(f"{ENDPOINT} has open requests; wait until they have ended")
    if engine.state != "running":
        raise RequestRefusedError(f"{ENDPOINT} is {engine.state}; resume or wake it first")
    work = _Work(engine, texts)
    submits = [work.open(request) for request in requests]
    if not keeps_cache:
        engine.reset()
    try:
        for submit in submits:
            if submit is not None:
                engine.submit(submit)
        while not engine.is_idle and work.failure is None:
            if check is not None:
                check()
            work.take(engine.step())
    finally:
        for submit in submits:
            if submit is not None:
                engine.abort(Abort(submit.id))
        engine.finish_in_flight()
        engine.take_ended()
    if work.failure is not None:
        raise work.failure
    return work.answers


class _Work:
    """The answers of one call, and the error that ends it."""

    def __init__(self, engine: ResettableEngine, texts: EngineTexts) -> None:
        self.answers: list[list[Answer]] = []
        self.failure: InferenceError | None = None
        self._engine, self._texts = engine, texts
        self._open: dict[tuple[int, int], tuple[Answer, AnswerReader | None]] = {}

    def open(self, request: InferenceRequest) -> Submit | None:
        """Return the request for the engine; None if a stop string in its generated tokens has ended it."""
        sampling, seed = request.sampling, request.sampling.seed
        if request.copies < 1:
            raise RequestRefusedError(f"{ENDPOINT}: copies is {request.copies}; it must be 1 or more")
        if sampling.grammar is not None:
            raise RequestRefusedError(f"{ENDPOINT}: a grammar is compiled beside the steps; use EngineClient for it")
        if request.stop and not self._texts.has_texts:
            raise RequestRefusedError(f"{ENDPOINT}: stop strings need a tokenizer; use sampling.stop_tokens")
        if seed is None and sampling.temperature > 0:
            raise RequestRefusedError(f"{ENDPOINT}: a request has no seed; give one, so that it can be repeated")
        seed = seed or 0
        prompt = self._texts.tokens(request)
        number = next(request_numbers)
        answers = []
        for index in range(request.copies):
            own = replace(request, copies=1, sampling=replace(sampling, seed=seed_of_copy(seed, index)))
            answer, reader = Answer(own, index), self._texts.reader(own, prompt)
            answer.prompt_tokens = len(prompt)
            answers.append(answer)
            if reader is not None:
                reader.replay(request.generated)
                if reader.is_stopped:
                    answer.add(AnswerDelta(finish="stop"), time.monotonic())
                    continue
            self._open[number, index] = (answer, reader)
        self.answers.append(answers)
        if all(answer.is_done for answer in answers):
            return None
        sampling = replace(sampling, seed=seed)
        return Submit(number, prompt, sampling, request.copies, request.priority, request.adapter, request.generated)

    def take(self, deltas: list[OutputDelta]) -> None:
        for delta in deltas:
            key = delta.id, delta.index
            if key not in self._open:  # behind a stop string
                continue
            answer, reader = self._open[key]
            if delta.finish == "error":
                kind = EndpointUnavailableError if delta.is_ours else RequestRefusedError
                self.failure = self.failure or kind(f"{ENDPOINT}: {delta.error}")
                continue
            answer.prompt_logprobs = delta.prompt_logprobs or answer.prompt_logprobs
            answer.add(answer_delta(delta, reader), time.monotonic())
            if answer.is_done:
                del self._open[key]
                if delta.finish is None:
                    self._engine.abort(Abort(*key))
