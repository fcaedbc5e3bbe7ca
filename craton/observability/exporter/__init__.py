"""The node exporter: Prometheus metrics of a node's GPUs, network, file systems, drives and host.

`FAMILIES` is the table of all metric families, `dcgm_counters` returns the counters file for dcgm-exporter,
`NodeExporter` is the exporter and `ExporterServer` serves it over HTTP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.observability.exporter.dcgm import dcgm_counters
    from craton.observability.exporter.duplicates import find_duplicates
    from craton.observability.exporter.families import FAMILIES
    from craton.observability.exporter.filesystem import SHARED_KINDS
    from craton.observability.exporter.fsx import fsx_bridge
    from craton.observability.exporter.node_exporter import ExporterServer, NodeExporter, cards_of
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
