"""Completions of prompts from the engine in this process; with an environment, turn by turn.

A synchronous rollout is a function of (weights, seed, prompt, copy): all prompts of a call are submitted at once, all
answers of a turn come before any environment answers, and nothing depends on a clock. Prompts and completions stay
token ids; only what an environment wrote is tokenized.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from craton.ml.data import Prompt, PromptEncoder
from craton.ml.posttraining.samples import RolloutSample
from craton.ml.posttraining.seeds import rollout_seed
from craton.ml.serving import Sampling, seed_of_copy
from craton.ml.serving.clients import Answer, InferenceRequest
from craton.ml.verifiers import Episode, Turn, Verdict, VerifierPool

WAIT_SECONDS = 0.1  # between two checks whether the generation is over

Check = Callable[[], None]
Result = TypeVar("Result")


class Generator(Protocol):
    """What generates completions: see `RolloutEngine.generate`."""

    def generate(
        self, requests: Sequence[InferenceRequest], keeps_cache: bool = False, check: Check | None = None
    ) -> list[list[Answer]]: ...


class Rollouts:
    """Generates groups of completions."""

    def __init__(
        self,
        generator: Generator,
        encoder: PromptEncoder,
        temperature: float,
        max_tokens: int,
        max_prompt_tokens: int,
        pool: VerifierPool | None = None,
        max_turns: int = 0,
    ) -> None:
        """`max_tokens`: of all turns of a sample, including what an environment writes. `max_turns`: 0 without an
        environment, which the pool has."""
        self._generator, self._encoder = generator, encoder
        self._temperature, self._max_tokens, self._max_turns = temperature, max_tokens, max_turns
        self._max_prompt_tokens, self._pool = max_prompt_tokens, pool

    def generate(self, prompts: Sequence[Prompt], group: int, seed: int, check: Check) -> list[RolloutSample]:
        """Return `group` samples of each prompt, in order. `check` is called again and again, and may raise."""
        began = time.monotonic()
        samples = [_opened(prompt, copy) for prompt in prompts for copy in range(group)]
        if not self._max_turns:
            self._answer(samples, seed, check, began, is_first=True)
            return samples
        assert self._pool is not None
        episodes = [self._pool.start_episode() for _ in samples]
        try:
            self._play(samples, episodes, seed, check, began)
        finally:
            for episode in episodes:
                episode.close()
        return samples

    def _play(
        self, samples: list[RolloutSample], episodes: list[Episode], seed: int, check: Check, began: float
    ) -> None:
        """Play all episodes, in rounds."""
        pairs = zip(samples, episodes, strict=True)
        turns = wait_for([episode.reset(sample.prompt.row) for sample, episode in pairs], check)
        active = []
        for sample, episode, turn in zip(samples, episodes, turns, strict=True):
            if turn.error:
                sample.verdict = Verdict(None, {}, turn.error)
                continue
            if turn.text is not None:
                tokens = self._encoder({**sample.prompt.row, "prompt": turn.text})
                if len(tokens) > self._max_prompt_tokens:
                    problem = (
                        f"the environment's prompt has {len(tokens):,} tokens; allowed: {self._max_prompt_tokens:,}"
                    )
                    sample.verdict = Verdict(None, {}, problem)
                    continue
                sample.prompt = replace(sample.prompt, row={**sample.prompt.row, "prompt": turn.text})
                sample.tokens, sample.prompt_length = tokens, len(tokens)
            active.append((sample, episode))
        for number in range(self._max_turns):
            if not active:
                return
            self._answer([sample for sample, _ in active], seed, check, began, is_first=number == 0)
            turns = wait_for([episode.step(sample.completion) for sample, episode in active], check)
            going = [
                (sample, episode)
                for (sample, episode), turn in zip(active, turns, strict=True)
                if not self._take_turn(sample, turn, is_last=number == self._max_turns - 1)
            ]
            active = going

    def _take_turn(self, sample: RolloutSample, turn: Turn, is_last: bool) -> bool:
        """Add what the environment answered; return whether the episode is over."""
        if turn.error:
            sample.verdict = Verdict(None, {}, turn.error)
        elif turn.is_last:
            sample.verdict = None if turn.reward is None else Verdict(turn.reward, {"environment": turn.reward})
            return True
        if turn.error or is_last or sample.is_truncated:
            sample.is_truncated = True
            return True
        assert isinstance(turn.text, str)
        is_chat = not isinstance(sample.prompt.content, str)
        tokens = self._encoder.next_turn(turn.text, is_chat, sample.tokens[-1])
        sample.transcript.append({"role": "environment", "content": turn.text})
        if len(sample.is_generated) + len(tokens) >= self._max_tokens:
            sample.is_truncated = True
            return True
        sample.tokens += tokens
        sample.is_generated += [False] * len(tokens)
        sample.logprobs += [0.0] * len(tokens)
        return False

    def _answer(self, samples: Sequence[RolloutSample], seed: int, check: Check, began: float, is_first: bool) -> None:
        """Generate the next turn of samples. Copies of one prompt are one request, so that they share its KV cache."""
        requests: list[InferenceRequest] = []
        members: list[list[RolloutSample]] = []
        for sample in samples:
            before = members[-1][-1] if members else None
            continues = (
                before is not None
                and before.prompt.index == sample.prompt.index
                and before.copy + 1 == sample.copy
                and before.tokens == sample.tokens
            )
            if continues:
                members[-1].append(sample)
                continue
            own = seed_of_copy(rollout_seed(seed, sample.prompt.index), sample.copy)
            sampling = Sampling(
                max_tokens=self._max_tokens - len(sample.is_generated),
                temperature=self._temperature,
                seed=own,
                logprobs=0,
                logprobs_mode="sampled",
            )
            requests.append(InferenceRequest(tuple(sample.tokens), sampling))
            members.append([sample])
        requests = [replace(request, copies=len(group)) for request, group in zip(requests, members, strict=True)]
        answers = self._generator.generate(requests, keeps_cache=not is_first, check=check)
        for group, of_group in zip(members, answers, strict=True):
            for sample, answer in zip(group, of_group, strict=True):
                self._add(sample, answer, began)

    def _add(self, sample: RolloutSample, answer: Answer, began: float) -> None:
        tokens = answer.sampled_tokens
        sample.tokens = [*sample.tokens, *tokens]
        sample.is_generated += [True] * len(tokens)
        sample.logprobs += answer.sampled_logprobs
        sample.versions += answer.sampled_versions
        sample.completion = self._encoder.text(answer.tokens)
        sample.is_truncated = answer.finish == "length"
        sample.seconds = (answer.heard_at or began) - began
        if self._max_turns:
            sample.transcript.append({"role": "assistant", "content": sample.completion})


def wait_for(futures: Sequence[Future[Result]], check: Check) -> list[Result]:
    """Return the results. `check` is called while they are awaited, and may raise."""
    waiting: set[Future[Any]] = set(futures)
    while waiting:
        waiting = wait(waiting, timeout=WAIT_SECONDS).not_done
        check()
    return [future.result() for future in futures]


def _opened(prompt: Prompt, copy: int) -> RolloutSample:
    tokens = list(prompt.tokens)
    return RolloutSample(prompt, copy, tokens, len(tokens), [], [], [])
