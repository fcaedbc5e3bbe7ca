"""The verifiers and judges that the job file lists, by name. They run in the pool's processes, never in this one.

A sample that a verifier cannot decide within its limit has no score, and is counted as a failure of that verifier.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from craton.job.sections.posttraining import RewardTerm, VerifySection
from craton.ml.serving.server.metrics import Metrics
from craton.ml.verifiers import VerifierPool, VerifierSample

LOGGED_CHARACTERS = 300

logger = logging.getLogger("craton.serving")


class ServerVerifiers:
    """One pool for all verifiers of a server. Use it as a context manager: closing it ends their processes."""

    def __init__(self, terms: Mapping[str, RewardTerm], verify: VerifySection, folder: Path | None = None) -> None:
        """`folder`: searched for users' functions first. VerifierError if one cannot be loaded or isolated."""
        self.names = tuple(terms)
        self._pool = VerifierPool(list(terms.values()), verify, folder) if terms else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def scorer(self, name: str, metrics: Metrics) -> ServerScorer:
        """Return what scores the completions of one request with one verifier."""
        assert self._pool is not None
        return ServerScorer(self._pool, self.names.index(name), name, metrics)

    def refusal(self, name: str, row: Mapping[str, Any]) -> str:
        """Return why a verifier cannot compare anything with a row; empty: it can."""
        assert self._pool is not None
        return self._pool.refusal(row, self.names.index(name))


class ServerScorer:
    """Scores completions with one term of the pool."""

    def __init__(self, pool: VerifierPool, term: int, name: str, metrics: Metrics) -> None:
        self.errors: list[str] = []
        self._pool = pool
        self._term = term
        self._name = name
        self._metrics = metrics

    async def score(self, prompt: Any, completions: list[str], row: Mapping[str, Any]) -> list[float | None]:
        """Return the score of each completion, None where there is none."""
        samples = [VerifierSample(prompt, completion, row) for completion in completions]
        # On a thread: the pool's connection may be full for a moment.
        submitted = await asyncio.to_thread(lambda: [self._pool.submit(sample, self._term) for sample in samples])
        verdicts = await asyncio.gather(*map(asyncio.wrap_future, submitted))
        failures = [verdict for verdict in verdicts if verdict.reward is None]
        self.errors += [verdict.error for verdict in failures]
        if failures:
            self._metrics.verifier_failed(self._name, len(failures))
            logger.warning(
                "verifier %s: %d of %d samples have no score: %s",
                self._name,
                len(failures),
                len(verdicts),
                failures[0].error[:LOGGED_CHARACTERS],
            )
        return [verdict.reward for verdict in verdicts]
