"""GPU metrics of a node: NVML or recorded answers, the ranks that use each GPU, XIDs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.observability.exporter.gpus.cards import CardLostError, Cards
    from craton.observability.exporter.gpus.gpu import CardLabels, CardSource, GpuCollector
    from craton.observability.exporter.gpus.nvml import NvmlCards
    from craton.observability.exporter.gpus.occupants import Occupants
    from craton.observability.exporter.gpus.recorded_cards import RecordedCards
    from craton.observability.exporter.gpus.xid import XidCollector
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
