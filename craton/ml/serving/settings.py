"""How an engine is set up. `auto` values are settled when the device's memory is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from craton.errors import CratonError

AttentionBackendName = Literal["auto", "torch", "triton"]


class ServingError(CratonError):
    """What was asked of an engine cannot be done."""


class NotNowError(ServingError):
    """The engine cannot do it in the state it is in; the request itself is right."""


@dataclass(frozen=True)
class EngineSettings:
    """Numbers that decide speed and memory, not answers."""

    max_length: int = 0  # tokens of prompt and answer; 0: what the model was made for
    max_running: int = 256  # requests computed together
    chunk_tokens: int = 2048  # computed in one step at most
    page: int = 16  # tokens of a block
    blocks: int = 0  # on the device; 0: what `memory` leaves room for
    memory: float = 0.9  # share of the device's memory that the engine may fill
    host_bytes: int = 0  # of host memory for blocks that had to leave the device
    kv_precision: Literal["auto", "fp8"] = "auto"
    backend: AttentionBackendName = "auto"
    graphs: Literal["auto", "always", "never"] = "auto"  # on a GPU; always: the same steps, as they are, elsewhere too
    draft_tokens: int = 0  # guessed by looking up n-grams in the text; 0: none
    adapters: Mapping[str, str] = field(default_factory=dict)  # name → folder
    adapter_slots: int = 0
    adapter_rank: int = 16
    overlap: bool = True  # start a step before the last one is read back

    def __post_init__(self) -> None:
        limits = {"max_running": 1, "chunk_tokens": 1, "page": 1, "draft_tokens": 0, "host_bytes": 0, "blocks": 0}
        for name, least in limits.items():
            if getattr(self, name) < least:
                raise ServingError(f"{name} is {getattr(self, name)}; it must be {least} or more")
        if self.backend not in get_args(AttentionBackendName):
            raise ServingError(f"backend is {self.backend!r}; allowed: {', '.join(get_args(AttentionBackendName))}")
        if not 0 < self.memory < 1:
            raise ServingError(f"memory is {self.memory}; it is a share of the device's memory, between 0 and 1")
