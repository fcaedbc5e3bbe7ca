"""Interface to a node's GPUs, implemented by NVML on a live node and by recorded answers of an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Card:
    index: int
    uuid: str
    bus_id: str  # 00000000:53:00.0, as NVML writes it
    name: str  # NVIDIA H200
    minor: int  # of /dev/nvidiaN

    @property
    def short_bus_id(self) -> str:
        """0000:53:00, as the kernel log writes it."""
        domain, _, rest = self.bus_id.lower().partition(":")
        return f"{domain[-4:]}:{rest.partition('.')[0]}"


@dataclass(frozen=True)
class CardProcess:
    pid: int
    memory_bytes: int  # 0: not known


class CardLostError(Exception):
    """The driver can no longer access this GPU."""


class NoDriverError(Exception):
    """NVML reports that the driver is not loaded."""


class Cards(Protocol):
    """Thin interface of NVML. Readings have the names of the key `nvml` in families.toml; a value that the GPU or
    driver lacks is omitted, never zero."""

    def list(self) -> Sequence[Card]: ...

    def read(self, card: Card) -> Mapping[str, float]:
        """Return the readings of a GPU; CardLostError when it is gone."""

    def processes(self, card: Card) -> Sequence[CardProcess]: ...

    def xids(self) -> Sequence[tuple[Card, int]]:
        """Return the XIDs since the last call."""

    def close(self) -> None: ...
