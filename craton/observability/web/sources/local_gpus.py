"""The GPUs of a run on this machine, read directly when no Prometheus is configured."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from craton.observability.web.sources.queries import GPU_FAMILIES
from craton.orchestration import read_submission
from craton.telemetry import RunDirectory, read_json

if TYPE_CHECKING:
    from craton.observability.exporter.gpus import Cards


class LocalGpus:
    """Read node → family → worst GPU, for runs on this machine whose ranks have GPUs; `trouble` has the reason if there
    is nothing."""

    def __init__(self, run: RunDirectory, reach: Callable[[], Cards] | None = None) -> None:
        launch = read_json(run.launch_path)
        self._nodes: list[str] = [str(node) for node in launch.get("nodes") or ()]
        self._cards_of_node = {str(node): str(cards) for node, cards in (launch.get("cards") or {}).items()}
        self._reach = reach or _reach
        self._is_wanted = bool(launch.get("gpus")) and read_submission(run).on == "local"
        self._cards: Cards | None = None
        self.trouble = ""

    def look(self) -> dict[str, dict[str, float]]:
        from craton.observability.exporter import FAMILIES
        from craton.observability.exporter.gpus import CardLostError

        if not self._is_wanted:
            return {}
        try:
            self._cards = self._cards or self._reach()
            there = self._cards.list()
        except Exception as error:  # noqa: BLE001 - NVML's error class is in an optional package
            self.trouble, self._is_wanted = f"cannot read the GPUs of this machine: {error}", False
            return {}
        result: dict[str, dict[str, float]] = {}
        for card in there:
            try:
                reading = self._cards.read(card)
            except CardLostError:
                self.trouble = f"GPU {card.index} ({card.uuid}) no longer responds"
                continue
            for node in self._nodes_with(card.uuid, card.index):
                values = result.setdefault(node, {})
                for name, (worst, _) in GPU_FAMILIES.items():
                    family = FAMILIES[name]
                    if family.nvml in reading:
                        value = reading[family.nvml] * family.scale
                        better = min if worst == "min" else max
                        values[name] = better(values[name], value) if name in values else value
        return result

    def _nodes_with(self, uuid: str, index: int) -> list[str]:
        """Return the nodes with this GPU: nodes that share a machine have their own GPUs; a single node has all."""
        if not self._cards_of_node:
            return self._nodes[:1]
        return [node for node, cards in self._cards_of_node.items() if {uuid, str(index)} & set(cards.split(","))]


def _reach() -> Cards:
    from craton.infrastructure.probes import NodeRoot
    from craton.observability.exporter import cards_of

    reach = cards_of(NodeRoot(), "auto")
    assert reach is not None
    return reach()
