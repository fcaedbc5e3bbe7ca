"""What an evaluation asks: an engine in this process over a folder's or a run's weights, or an OpenAI endpoint."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from craton.job import Job
from craton.job.sections.posttraining import ApiEndpoint
from craton.ml.evaluation.errors import EvaluationError
from craton.ml.serving.clients import EngineClient, InferenceClient, OpenAIClient, connect


class EvaluationTarget:
    """Opens a client for each checkpoint; a run or a folder is loaded when its turn comes."""

    def __init__(self, job: Job, report: Callable[[str], None]) -> None:
        assert job.eval is not None
        self._job, self._section, self._report = job, job.eval, report

    @property
    def checkpoints(self) -> list[int | None]:
        """The checkpoints to evaluate: steps, or None for what a folder or endpoint has, or the newest of a run."""
        wanted = self._section.checkpoints
        if wanted is None:
            return [self._newest()]
        from craton.ml.export import checkpoint_steps

        there = checkpoint_steps(self._run())
        if not there:
            raise EvaluationError(f"eval.checkpoints: {self._run()} has no checkpoint")
        if wanted == "all":
            return list(there)
        if missing := [step for step in wanted if step not in there]:
            raise EvaluationError(
                f"eval.checkpoints: there is no checkpoint of step {missing[0]}; there are {', '.join(map(str, there))}"
            )
        return list(wanted)

    @asynccontextmanager
    async def client(self, step: int | None, num_slots: int) -> AsyncIterator[InferenceClient]:
        """Open the client of a checkpoint for so many answers at a time."""
        if self._section.endpoint is not None:
            async with await self._connect(self._section.endpoint, num_slots) as client:
                yield client
            return
        async with self._engine_client(step, num_slots) as client:
            yield client

    async def _connect(self, endpoint: ApiEndpoint, num_slots: int) -> InferenceClient:
        key = os.environ.get(endpoint.key) if endpoint.key else None
        if endpoint.key and not key:
            raise EvaluationError(f"eval.endpoint: the variable {endpoint.key} is not set; name it in run.secrets")
        client = await connect(endpoint.url, model=endpoint.model, api_key=key, max_in_flight=num_slots)
        if isinstance(client, OpenAIClient):
            client.reads_usage = True
        return client

    def _engine_client(self, step: int | None, num_slots: int) -> EngineClient:
        import torch

        from craton.ml.serving import EngineSettings
        from craton.ml.serving.device import load_named
        from craton.ml.serving.engine import build_engine, bytes_of_block
        from craton.planning.serving import CPU_KV_BYTES

        has_gpu = torch.cuda.is_available()
        device, dtype = (torch.device("cuda", 0), torch.bfloat16) if has_gpu else (torch.device("cpu"), torch.float32)
        self._report("loading weights" if step is None else f"loading weights of step {step:,}")
        served = load_named(self._source(), step, device, dtype)
        settings = EngineSettings(max_length=self._section.max_length or 0, max_running=min(num_slots, 256))
        self._report("preparing the engine")
        if not has_gpu:  # no more KV cache than the answers in flight can use
            length = settings.max_length or served.model.config.shape.max_sequence or 4096
            blocks = settings.max_running * -(-length // settings.page) + 2
            settings = replace(settings, blocks=min(blocks, CPU_KV_BYTES // bytes_of_block(served.model, settings)))
        engine = build_engine(served.model, settings, served.stop_tokens, served.tokenizer_folder)
        return EngineClient(engine, served.tokenizer_folder, max_in_flight=num_slots)

    def _source(self) -> str:
        """Return what the model is loaded from: a run's directory, a folder or a Hub id."""
        if self._job.trained_run is not None:
            return str(self._job.trained_run)
        folder = self._job.weights_folder
        if folder is None:
            raise EvaluationError(
                f"{self._job.where('model')}{self._job.evaluated_name} has no weights on this machine; give a folder "
                "with *.safetensors, a Hub id in the local cache, or a run"
            )
        return str(folder)

    def _run(self) -> str:
        if self._job.trained_run is None:
            raise EvaluationError(
                f"{self._job.where('eval', 'checkpoints')}eval.checkpoints needs a run, and {self._job.evaluated_name} "
                "is none"
            )
        return str(self._job.trained_run)

    def _newest(self) -> int | None:
        """Return the newest checkpoint now, so that an evaluation that continues has the same weights."""
        if self._job.trained_run is None:
            return None
        from craton.ml.export import checkpoint_steps

        run = self._job.trained_run
        steps = checkpoint_steps(str(run))
        if not steps:
            raise EvaluationError(f"the run {run.name} has no checkpoint yet; `craton stop {run.name}` saves one")
        return steps[-1]
