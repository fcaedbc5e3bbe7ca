"""Asks the endpoint of `rollout.endpoint`, before anything starts, whether its completions can be trained on."""

from __future__ import annotations

import asyncio
import os

from craton.job import Job
from craton.ml.serving.clients import (
    AnswerTimeoutError,
    EndpointUnavailableError,
    InferenceError,
    Retries,
    Timeouts,
    connect,
    rollout_capabilities,
)
from craton.orchestration.errors import StartError

TIMEOUTS = Timeouts(connect=5.0, first_token=60.0)
RETRIES = Retries(max_tries=2, max_seconds=5.0)


def check_rollout_endpoint(job: Job, is_here: bool) -> None:
    """Refuse an endpoint that does not give token ids and log-probabilities. One that cannot be reached is refused if
    the job runs here; elsewhere its ranks may reach it."""
    rollout = job.rollout
    if rollout is None or rollout.endpoint is None:
        return
    endpoint, temperature = rollout.endpoint, rollout.temperature
    key = os.environ.get(endpoint.key, "") if endpoint.key else ""

    async def ask() -> None:
        client = await connect(
            endpoint.url, model=endpoint.model, api_key=key or None, timeouts=TIMEOUTS, retries=RETRIES
        )
        async with client:
            await client.require(*rollout_capabilities(temperature))

    try:
        asyncio.run(ask())
    except (EndpointUnavailableError, AnswerTimeoutError) as error:
        if is_here:
            raise StartError(f"{job.where('rollout', 'endpoint')}rollout.endpoint: {error}") from None
    except InferenceError as error:
        raise StartError(f"{job.where('rollout', 'endpoint')}rollout.endpoint: {error}") from None
