"""The verifiers, judges and reward models that the job file lists, by name. None of them runs in this process.

A sample that cannot be scored within the limit has no score, and is counted as a failure of its verifier.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

from craton.job.model import chat_folder, check_reward_model
from craton.job.sections.posttraining import RewardTerm
from craton.job.sections.serving import Serve
from craton.ml.serving.server.metrics import Metrics
from craton.ml.verifiers import RewardModelProcess, RewardModelSetup, Verdict, VerifierPool, VerifierSample

LOGGED_CHARACTERS = 300

logger = logging.getLogger("craton.serving")

Submit = Callable[[VerifierSample], Future[Verdict]]


class ServerVerifiers:
    """One pool for all verifiers of a server, and a process for each reward model. Use it as a context manager: closing
    it ends the processes."""

    def __init__(self, serve: Serve, folder: Path | None = None, model_folder: Path | None = None) -> None:
        """Return once all are ready. `folder`: searched for users' functions first; `model_folder`: of the served
        model. ModelError or VerifierError if one cannot be loaded or isolated."""
        self.names = tuple(serve.verifiers)
        pooled = {name: term for name, term in serve.verifiers.items() if term.model is None}
        self._pooled = tuple(pooled)
        self._pool: VerifierPool | None = None
        self.reward_models: dict[str, RewardModelProcess] = {}
        with ExitStack() as started:
            for name, term in serve.verifiers.items():
                if term.model is not None:
                    process = RewardModelProcess(name, _setup(serve, term, model_folder), term.weight)
                    self.reward_models[name] = started.enter_context(process)
            if pooled:
                self._pool = started.enter_context(VerifierPool(list(pooled.values()), serve.verify, folder))
            self._started = started.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._started.close()

    def scorer(self, name: str, metrics: Metrics) -> ServerScorer:
        """Return what scores the completions of one request with one verifier."""
        if name in self.reward_models:
            return ServerScorer(self.reward_models[name].submit, name, metrics)
        assert self._pool is not None
        return ServerScorer(partial(self._pool.submit, only=self._pooled.index(name)), name, metrics)

    def refusal(self, name: str, row: Mapping[str, Any]) -> str:
        """Return why a verifier cannot compare anything with a row; empty: it can."""
        if name in self.reward_models:
            return ""
        assert self._pool is not None
        return self._pool.refusal(row, self._pooled.index(name))


class ServerScorer:
    """Scores completions with one verifier or reward model."""

    def __init__(self, submit: Submit, name: str, metrics: Metrics) -> None:
        self.errors: list[str] = []
        self._submit = submit
        self._name = name
        self._metrics = metrics

    async def score(self, prompt: Any, completions: list[str], row: Mapping[str, Any]) -> list[float | None]:
        """Return the score of each completion, None where there is none."""
        samples = [VerifierSample(prompt, completion, row) for completion in completions]
        # On a thread: the pool's connection may be full for a moment.
        submitted = await asyncio.to_thread(lambda: [self._submit(sample) for sample in samples])
        verdicts = await asyncio.gather(*map(asyncio.wrap_future, submitted))
        failures = [verdict for verdict in verdicts if verdict.reward is None]
        self.errors += [verdict.error for verdict in failures]
        self._metrics.verified(self._name, len(verdicts) - len(failures), len(failures))
        if failures:
            logger.warning(
                "verifier %s: %d of %d samples have no score: %s",
                self._name,
                len(failures),
                len(verdicts),
                failures[0].error[:LOGGED_CHARACTERS],
            )
        return [verdict.reward for verdict in verdicts]


def _setup(serve: Serve, term: RewardTerm, model_folder: Path | None) -> RewardModelSetup:
    folder = Path(term.model or "")
    check_reward_model(folder, model_folder)
    chats = chat_folder(folder, model_folder)
    return RewardModelSetup(
        str(folder),
        None if chats is None else str(chats),
        serve.verify.limit,
        serve.reward_memory,
        "fp32" if serve.precision == "fp32" else "bf16",
    )
