"""From a prompt index to a finished group: generated, continued on another endpoint where one is lost, verified."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from craton.errors import CratonError
from craton.ml.data import Prompt, PromptEncoder, PromptSource
from craton.ml.posttraining.asynchronous.endpoints import Endpoints, RolloutEndpoint
from craton.ml.posttraining.asynchronous.groups import ENVIRONMENT, RolloutCopy, RolloutGroup, fingerprint_of
from craton.ml.posttraining.seeds import rollout_seed
from craton.ml.serving import Sampling, seed_of_copy
from craton.ml.serving.clients import (
    Answer,
    EndpointUnavailableError,
    InferenceError,
    InferenceRequest,
    MissingCapabilityError,
    RequestRefusedError,
)
from craton.ml.verifiers import Episode, Turn, Verdict, VerifierPool, VerifierSample

MAX_FAILURES = 8  # of one copy in a row, without a new token, at endpoints that are otherwise ready
MAX_LOGPROB = 1e-3  # 0, but for rounding
CONTINUED_SEEDS = 1 << 10  # of an endpoint that cannot continue a request: distance of the seeds of its parts


class GenerationError(CratonError):
    """Completions cannot be generated."""


@dataclass(frozen=True)
class CompletionSettings:
    """What is generated for a prompt."""

    group: int
    max_tokens: int  # of all turns, including what an environment writes
    temperature: float = 1.0
    seed: int = 0
    max_prompt_tokens: int = 1 << 30  # that an environment may write
    max_turns: int = 0  # of an environment; 0: there is none
    stop_tokens: tuple[int, ...] = ()
    vocabulary: int = 1 << 31  # of the model that is trained


class Completions:
    """Completes groups on the event loop. What it adds to a group is complete at any moment between two awaits."""

    def __init__(
        self,
        endpoints: Endpoints,
        settings: CompletionSettings,
        source: PromptSource,
        encoder: PromptEncoder,
        pool: VerifierPool | None,
    ) -> None:
        """Without a pool, samples have no rewards."""
        self.endpoints, self.settings = endpoints, settings
        self._source, self._encoder, self._pool = source, encoder, pool
        self._running: dict[int, _Running] = {}  # by id of the generation
        self.num_tokens = 0  # that were generated
        self.verifying = 0  # samples

    async def finish(self, group: RolloutGroup) -> None:
        """Generate and verify what a group lacks."""
        prompt = self._source.prompt(group.index)
        if not group.copies:
            group.fingerprint = fingerprint_of(prompt)
            group.copies = [RolloutCopy() for _ in range(self.settings.group)]
        answers: Sequence[_Running | None] = [None] * len(group.copies)
        is_new = not any(copy.tokens or copy.is_complete for copy in group.copies)
        if is_new and not self.settings.max_turns:
            answers = await self._start_together(group, prompt)
        async with asyncio.TaskGroup() as tasks:
            for number, copy in enumerate(group.copies):
                if not copy.is_complete:
                    tasks.create_task(self._complete(group, prompt, number, answers[number]))

    def snapshot(self, group: RolloutGroup) -> RolloutGroup:
        """Return a group with all tokens that have come, also of answers that have not ended."""
        copies = [
            copy.snapshot(running.unfinished()) if (running := self._running.get(id(copy))) else copy.snapshot()
            for copy in group.copies
        ]
        has_begun = any(copy.tokens or copy.is_complete for copy in copies)
        return replace(group, copies=copies) if has_begun else RolloutGroup(group.index)

    async def _complete(self, group: RolloutGroup, prompt: Prompt, number: int, running: _Running | None) -> None:
        """Generate and verify one copy."""
        copy = group.copies[number]
        began = time.monotonic()
        if self.settings.max_turns:
            await self._play(group, prompt, number)
        elif not copy.has_ended:
            await self._generate(group, number, copy, prompt.tokens, self.settings.max_tokens, running)
            copy.seconds = time.monotonic() - began
        copy = group.copies[number]
        if copy.verdict is None and self._pool is not None:
            await self._verify(copy, prompt)
        copy.is_complete = True

    async def _verify(self, copy: RolloutCopy, prompt: Prompt) -> None:
        assert self._pool is not None
        sample = copy.sample(prompt, 0)
        self.verifying += 1
        try:
            wanted = VerifierSample(sample.prompt.content, copy.completion, sample.prompt.row, copy.transcript)
            copy.verdict = await asyncio.wrap_future(self._pool.submit(wanted))
        finally:
            self.verifying -= 1

    # -- turns of an environment --------------------------------------------------------------------------------------

    async def _play(self, group: RolloutGroup, prompt: Prompt, number: int) -> None:
        assert self._pool is not None
        copy = group.copies[number] = RolloutCopy()  # an unfinished episode begins again
        with self._pool.start_episode() as episode:
            turn = await asyncio.wrap_future(episode.reset(prompt.row))
            if turn.error:
                copy.verdict = Verdict(None, {}, turn.error)
                return
            tokens = list(prompt.tokens)
            copy.content = prompt.content if turn.text is None else turn.text
            if turn.text is not None:
                tokens = self._encoder({**prompt.row, "prompt": turn.text})
            copy.prompt = tokens
            if len(tokens) > self.settings.max_prompt_tokens:
                allowed = f"allowed: {self.settings.max_prompt_tokens:,}"
                problem = f"the environment's prompt has {len(tokens):,} tokens; {allowed}"
                copy.verdict = Verdict(None, {}, problem)
                return
            for turns in range(1, self.settings.max_turns + 1):
                if not await self._play_turn(group, number, episode, is_last=turns == self.settings.max_turns):
                    return

    async def _play_turn(self, group: RolloutGroup, number: int, episode: Episode, is_last: bool) -> bool:
        """Generate a turn and let the environment answer; return whether the episode goes on."""
        copy = group.copies[number]
        left = self.settings.max_tokens - len(copy.tokens)
        turn_tokens = RolloutCopy()
        await self._generate(group, number, turn_tokens, (*copy.prompt, *copy.tokens), left, None)
        copy.add(turn_tokens.tokens, turn_tokens.logprobs, turn_tokens.versions)
        copy.completion, copy.is_truncated = turn_tokens.completion, turn_tokens.is_truncated
        copy.transcript.append({"role": "assistant", "content": copy.completion})
        turn: Turn = await asyncio.wrap_future(episode.step(copy.completion))
        if turn.error:
            copy.verdict, copy.is_truncated = Verdict(None, {}, turn.error), True
            return False
        if turn.is_last:
            copy.verdict = None if turn.reward is None else Verdict(turn.reward, {"environment": turn.reward})
            return False
        if is_last or copy.is_truncated:
            copy.is_truncated = True
            return False
        assert isinstance(turn.text, str)
        tokens = self._encoder.next_turn(turn.text, not isinstance(copy.content, str), copy.tokens[-1])
        copy.transcript.append({"role": "environment", "content": turn.text})
        if len(copy.tokens) + len(tokens) >= self.settings.max_tokens:
            copy.is_truncated = True
            return False
        copy.add(tokens, [0.0] * len(tokens), [ENVIRONMENT] * len(tokens))
        return True

    # -- tokens -------------------------------------------------------------------------------------------------------

    async def _start_together(self, group: RolloutGroup, prompt: Prompt) -> list[_Running | None]:
        """Submit all copies as one request, so that they share the KV cache of their prompt."""
        endpoint = await self.endpoints.take(group.index, len(group.copies))
        try:
            request = self._request(endpoint, group, 0, prompt.tokens, self.settings.max_tokens, RolloutCopy())
            group.begun = endpoint.version
            answers = await endpoint.client.submit(replace(request, copies=len(group.copies)))
        except BaseException as error:
            self.endpoints.give(endpoint, len(group.copies))
            if not isinstance(error, InferenceError):
                raise
            self._note_failure(endpoint, error)
            return [None] * len(group.copies)
        started: list[_Running | None] = []
        for copy, answer in zip(group.copies, answers, strict=True):
            running = _Running(endpoint, answer)
            self._running[id(copy)] = running
            started.append(running)
        return started

    async def _generate(
        self,
        group: RolloutGroup,
        number: int,
        copy: RolloutCopy,
        prompt: Sequence[int],
        max_tokens: int,
        running: _Running | None,
    ) -> None:
        """Generate until the completion ends: go on elsewhere with the tokens so far if an endpoint is lost."""
        failures = 0
        while True:
            try:
                if running is None:
                    running = await self._start(group, number, copy, prompt, max_tokens)
                await self._follow(running)
            except InferenceError as error:
                received = running.received() if running is not None else ([], [], [])
                copy.add(*received)
                is_counted = not isinstance(error, EndpointUnavailableError)
                failures = 0 if received[0] else failures + is_counted
                if running is not None:
                    self._note_failure(running.endpoint, error)
                if failures >= MAX_FAILURES:
                    raise GenerationError(
                        f"prompt {group.index}, copy {number}: failed {failures} times without a new token: {error}"
                    ) from None
            else:
                answer, received = running.answer, running.received()
                copy.add(*received)
                if len({len(column) for column in received}) > 1:
                    counts = f"{len(received[0])} tokens, but {len(received[1])} log-probabilities"
                    raise GenerationError(f"{running.endpoint.name} returned {counts}; it must return one for each")
                copy.completion = self._encoder.text(_without_stop(copy, answer))
                copy.is_truncated = answer.finish == "length"
                copy.has_ended = True
                return
            finally:
                if running is not None:
                    self._end(copy, running)
            running = None

    async def _start(
        self, group: RolloutGroup, number: int, copy: RolloutCopy, prompt: Sequence[int], max_tokens: int
    ) -> _Running:
        endpoint = await self.endpoints.take(group.index)
        try:
            request = self._request(endpoint, group, number, prompt, max_tokens, copy)
            if group.begun is None:
                group.begun = endpoint.version
            (answer,) = await endpoint.client.submit(request)
        except BaseException as error:
            self.endpoints.give(endpoint)
            if isinstance(error, InferenceError):
                self._note_failure(endpoint, error)
            raise
        running = _Running(endpoint, answer)
        self._running[id(copy)] = running
        return running

    def _request(
        self,
        endpoint: RolloutEndpoint,
        group: RolloutGroup,
        number: int,
        prompt: Sequence[int],
        max_tokens: int,
        copy: RolloutCopy,
    ) -> InferenceRequest:
        settings = self.settings
        seed = seed_of_copy(rollout_seed(settings.seed, group.index), number)
        sampling = Sampling(
            max_tokens=max_tokens,
            temperature=settings.temperature,
            seed=seed,
            logprobs=0,
            logprobs_mode="sampled",
        )
        if endpoint.continues:
            sampling = replace(sampling, stop_tokens=settings.stop_tokens)
            return InferenceRequest(tuple(prompt), sampling, generated=tuple(copy.tokens))
        # A longer prompt: the endpoint counts its tokens from there, so it must not draw the same noise again.
        part = seed + CONTINUED_SEEDS * len(copy.tokens)
        sampling = replace(
            sampling, max_tokens=max_tokens - len(copy.tokens), seed=part if endpoint.has_seeds else None
        )
        return InferenceRequest((*prompt, *copy.tokens), sampling)

    async def _follow(self, running: _Running) -> None:
        """Read an answer to its end."""
        answer, endpoint = running.answer, running.endpoint
        async for delta in endpoint.client.stream(answer):
            self.num_tokens += len(delta.tokens)
            self._check(endpoint, delta.tokens, delta.logprobs)
            if endpoint.has_versions and any(
                version - endpoint.version_offset < running.version for version in delta.versions
            ):
                raise InferenceError(f"{endpoint.name} has other weights than those that were sent: it restarted")
        if answer.finish not in ("stop", "length"):
            raise InferenceError(f"{endpoint.name}: the answer ended with {answer.finish}")
        self._check(endpoint, answer.sampled_tokens[-1:], answer.sampled_logprobs[-1:])  # the stop token is in no delta

    def _check(self, endpoint: RolloutEndpoint, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Raise if these cannot come from the model that is trained."""
        size = self.settings.vocabulary
        if (token := next((token for token in tokens if not 0 <= token < size), None)) is not None:
            raise GenerationError(
                f"{endpoint.name} returned the token id {token}, outside the vocabulary of {size:,} of the model that "
                "is trained; it must serve a model with the same tokenizer"
            )
        if (value := next((value for value in logprobs if not -math.inf < value <= MAX_LOGPROB), None)) is not None:
            raise GenerationError(f"{endpoint.name} returned {value} as a log-probability; it must be finite and <= 0")

    def _end(self, copy: RolloutCopy, running: _Running) -> None:
        running.endpoint.client.abort(running.answer)
        if self._running.pop(id(copy), None) is not None:
            self.endpoints.give(running.endpoint)

    def _note_failure(self, endpoint: RolloutEndpoint, error: InferenceError) -> None:
        """Take an endpoint for lost, unless the request is at fault, which ends the run."""
        if isinstance(error, RequestRefusedError | MissingCapabilityError):
            raise error
        self.endpoints.lose(endpoint, str(error))


class _Running:
    """An answer on its way."""

    def __init__(self, endpoint: RolloutEndpoint, answer: Answer) -> None:
        self.endpoint, self.answer = endpoint, answer
        self.version = endpoint.version  # tokens of older weights are none of ours

    def received(self) -> tuple[list[int], list[float], list[int]]:
        """Return tokens, log-probabilities and versions that have come, up to the first of other weights."""
        answer, offset = self.answer, self.endpoint.version_offset
        tokens, logprobs = answer.sampled_tokens, answer.sampled_logprobs
        versions = [version - offset for version in answer.sampled_versions]
        if not self.endpoint.has_versions:
            versions = [self.endpoint.version] * len(tokens)
        valid = next((place for place, version in enumerate(versions) if version < self.version), len(versions))
        return tokens[:valid], logprobs[:valid], versions[:valid]

    def unfinished(self) -> tuple[list[int], list[float], list[int]]:
        """Return the same without the token that ended the answer: a request cannot continue behind it."""
        tokens, logprobs, versions = self.received()
        count = len(tokens) - 1 if self.answer.finish is not None and tokens else len(tokens)
        return tokens[:count], logprobs[:count], versions[:count]


def _without_stop(copy: RolloutCopy, answer: Answer) -> list[int]:
    return copy.tokens if answer.stop_token is None else copy.tokens[:-1]
