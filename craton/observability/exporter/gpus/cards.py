"""What the exporter asks of a node's GPUs, whoever answers: NVML on a live node, recorded answers on an image."""

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
    memory_bytes: int  # 0: not told


class CardLostError(Exception):
    """The driver does not answer for this card any more."""


class NoDriverError(Exception):
    """NVML answers, and says that the driver is not loaded."""


class Cards(Protocol):
    """A thin face of NVML. Readings have the names that `nvml` has in families.toml; what a card or a driver does not
    know is left out, never zero."""

    def list(self) -> Sequence[Card]: ...

    def read(self, card: Card) -> Mapping[str, float]:
        """CardLostError when the card is gone."""

    def processes(self, card: Card) -> Sequence[CardProcess]: ...

    def xids(self) -> Sequence[tuple[Card, int]]:
        """XIDs since the last call."""

    def close(self) -> None: ...
