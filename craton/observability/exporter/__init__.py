"""The node exporter: what a node's GPUs, network, file systems, drives and processors show, as Prometheus reads it.

`FAMILIES` is the table of everything it can serve, `dcgm_counters` the counters file for dcgm-exporter, `NodeExporter`
the exporter itself and `ExporterServer` its port.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import loader

if TYPE_CHECKING:
    from craton.observability.exporter.cards import Card, CardLostError, CardProcess, Cards
    from craton.observability.exporter.dcgm import ONLY_DCGM, dcgm_counters
    from craton.observability.exporter.families import FAMILIES, NODE_LABELS, Family
    from craton.observability.exporter.filesystem import SHARED_KINDS
    from craton.observability.exporter.fsx import fsx_bridge
    from craton.observability.exporter.node_exporter import DEFAULT_PORT, ExporterServer, NodeExporter, cards_of
else:
    __getattr__ = loader(
        __name__,
        {
            "cards": ("Card", "CardLostError", "CardProcess", "Cards"),
            "dcgm": ("ONLY_DCGM", "dcgm_counters"),
            "families": ("FAMILIES", "NODE_LABELS", "Family"),
            "filesystem": ("SHARED_KINDS",),
            "fsx": ("fsx_bridge",),
            "node_exporter": ("DEFAULT_PORT", "ExporterServer", "NodeExporter", "cards_of"),
        },
    )

__all__ = [
    "DEFAULT_PORT",
    "FAMILIES",
    "NODE_LABELS",
    "ONLY_DCGM",
    "SHARED_KINDS",
    "Card",
    "CardLostError",
    "CardProcess",
    "Cards",
    "ExporterServer",
    "Family",
    "NodeExporter",
    "cards_of",
    "dcgm_counters",
    "fsx_bridge",
]
