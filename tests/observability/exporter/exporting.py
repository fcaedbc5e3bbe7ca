"""What the exporter's tests have in common: a scrape as samples that can be looked up."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from observability.exporter.stand_in_nvml import StandInNvml
from prometheus_client.parser import text_string_to_metric_families

from craton.infrastructure.probes import NodeRoot
from craton.observability.exporter import FAMILIES, NodeExporter, cards_of
from craton.observability.exporter.gpus import NvmlCards


@dataclass
class Scrape:
    text: str

    @property
    def samples(self) -> list[tuple[str, dict[str, str], float]]:
        return _parsed(self.text)

    def rows(self, name: str, **labels: str) -> list[tuple[dict[str, str], float]]:
        # The parser takes its time: it is given the lines of this family alone.
        lines = [line for line in self.text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        # An absent label is an empty one, as for Prometheus.
        return [
            (found, value)
            for _, found, value in _parsed("\n".join(lines) + "\n")
            if all(found.get(label, "") == wanted for label, wanted in labels.items())
        ]

    def value(self, name: str, **labels: str) -> float:
        rows = self.rows(name, **labels)
        assert len(rows) == 1, f"{name}{labels} has {len(rows)} rows: {rows}"
        return rows[0][1]

    def names(self) -> set[str]:
        return set(re.findall(r"^(\w+)[{ ]", self.text, re.MULTILINE))


@contextmanager
def exporting(root: Path | str, nvml: StandInNvml | None = None, **options: Any) -> Iterator[NodeExporter]:
    """An exporter of an image; with the stand-in as its NVML where one is given."""
    at = NodeRoot(root)
    open_cards = (lambda: NvmlCards(nvml)) if nvml else cards_of(at, options.pop("mode", "auto"))
    exporter = NodeExporter(at, open_cards=open_cards, **options)
    try:
        yield exporter
    finally:
        exporter.close()


def _parsed(text: str) -> list[tuple[str, dict[str, str], float]]:
    """By prometheus-client, which ends every counter with _total; Prometheus itself takes names as they are."""
    return [
        (sample.name if sample.name in FAMILIES else sample.name.removesuffix("_total"), sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


def scrape(exporter: NodeExporter) -> Scrape:
    return Scrape(exporter.scrape())


def collected(samples: Sequence[Any] | Iterator[Any]) -> dict[tuple[str, ...], float]:
    """Samples of a collector: (name, *labels) → value."""
    return {(name, *labels): value for name, labels, value in samples}
