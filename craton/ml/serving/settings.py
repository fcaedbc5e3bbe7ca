"""Engine settings. `auto` values are resolved when the device's memory is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from craton.errors import CratonError
from craton.planning.serving import AUTO_LENGTHS

AttentionBackendName = Literal["auto", "torch", "triton"]


class ServingError(CratonError):
    """A request or setting that the engine cannot accept."""


class NotNowError(ServingError):
    """The engine's present state does not allow a valid request."""


@dataclass(frozen=True)
class SharingCosts:
    """What reading common beginnings once costs a decode step, in tokens of KV cache that it could read instead."""

    step: float = 0.0  # however many requests there are
    share: float = 0.0  # of every token that is still read


@dataclass(frozen=True)
class EngineSettings:
    """Settings that affect speed and memory, not answers."""

    max_length: int = 0  # tokens of prompt and answer; 0: the model's own limit
    max_running: int = 256  # maximum requests in a batch
    chunk_tokens: int = 2048  # maximum tokens in a step
    page: int = 16  # tokens of a KV cache block
    blocks: int = 0  # KV cache blocks on the device; 0: as many as `memory` allows
    memory: float = 0.9  # share of the device memory that the engine may use
    host_bytes: int = 0  # host memory for evicted KV cache blocks
    kv_precision: Literal["auto", "bf16", "fp8"] = "auto"
    backend: AttentionBackendName = "auto"
    graphs: Literal["auto", "always", "never"] = (
        "auto"  # auto: on a GPU; always: also the same steps, run eagerly, elsewhere
    )
    draft_tokens: int = 0  # of a request per step, by n-gram lookup or a draft model (speculative decoding); 0: none
    draft_auto: bool = False  # draft_tokens is the maximum: their number follows the acceptance of a draft model
    adapters: Mapping[str, str] = field(default_factory=dict)  # name → folder
    adapter_slots: int = 0
    adapter_rank: int = 16
    shared_prefix: Literal["auto", "on", "off"] = "auto"  # read common beginnings once per group; auto: on
    sharing_costs: SharingCosts = SharingCosts()  # of the device
    overlap: bool = True  # start a step before the last one is read back

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        """Numbers of draft tokens that a step may have."""
        if self.draft_auto:
            return tuple(length for length in AUTO_LENGTHS if length <= self.draft_tokens)
        return (self.draft_tokens,) if self.draft_tokens else ()

    def __post_init__(self) -> None:
        limits = {"max_running": 1, "chunk_tokens": 1, "page": 1, "draft_tokens": 0, "host_bytes": 0, "blocks": 0}
        for name, minimum in limits.items():
            if getattr(self, name) < minimum:
                raise ServingError(f"{name} is {getattr(self, name)}; it must be {minimum} or more")
        if self.backend not in get_args(AttentionBackendName):
            raise ServingError(f"backend is {self.backend!r}; allowed: {', '.join(get_args(AttentionBackendName))}")
        if self.shared_prefix not in ("auto", "on", "off"):
            raise ServingError(f"shared_prefix is {self.shared_prefix!r}; allowed: auto, on, off")
        if not 0 < self.memory < 1:
            raise ServingError(f"memory is {self.memory}; it must be a share of the device memory between 0 and 1")
