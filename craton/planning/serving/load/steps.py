"""What the load needs to know of a replica: the times of its steps, and its limits."""

from __future__ import annotations

from typing import Any, Protocol


class ReplicaSteps(Protocol):
    """One replica of a deployment, or several deployments as arrays. Seconds of one step; arguments broadcast."""

    kv_tokens: Any  # KV cache tokens of the replica, all attention-data-parallel ranks together
    step_tokens: Any  # prefill tokens per step and attention-data-parallel rank
    max_running: Any  # requests of the replica
    gpus: Any  # of the replica
    join_steps: Any  # from a request's arrival to the step that begins its prefill
    prefill_steps: Any  # over which the scheduler spreads prompt tokens that wait

    def least_chunk(self, decoding: Any = 0.0) -> Any:
        """The prompt tokens of a step beside `decoding` requests, if as many wait."""

    def step_budget(self, waiting: Any, decoding: Any = 0.0) -> Any:
        """The largest prompt tokens of a step of one rank beside `decoding` requests, if `waiting` tokens wait."""

    def decode_seconds(self, batch: Any, context: Any) -> Any:
        """One decode step of `batch` requests of the replica with `context` tokens each."""

    def prefill_seconds(self, tokens: Any, context: Any = 0.0) -> Any:
        """The whole prefill of one request alone: `tokens` of its prompt after `context` cached tokens."""

    def mixed_seconds(self, batch: Any, context: Any, tokens: Any, prompt: Any) -> Any:
        """One step: decode of `batch` requests, and `tokens` prompt tokens of prompts of this length."""
