"""Every metric family of the node exporter as data: name, type, labels, what it is read from, and its source.

Tests check rules and dashboards against FAMILIES, and the exporter exports only families in it.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from datetime import date
from importlib import resources
from typing import Any, Literal

NODE_LABELS = ("node", "leaf")  # the last labels of every family


@dataclass(frozen=True)
class Family:
    name: str
    kind: Literal["gauge", "counter"]
    help: str
    own_labels: tuple[str, ...]  # a sample has their values
    collector: str
    source: str
    date: date
    dcgm: bool = False  # whether dcgm-exporter can export it under the same name
    nvml: str = ""  # NVML field or call it is read from, for GPU families
    scale: float = 1.0  # factor from NVML's unit to the family's
    cloudwatch: str = ""  # METRIC.Statistic

    @property
    def labels(self) -> tuple[str, ...]:
        return (*self.own_labels, *NODE_LABELS)


def _read() -> dict[str, Family]:
    text = resources.files("craton.observability.exporter").joinpath("families.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    return {family.name: family for group in table["group"] for family in _group(group, table["labels"])}


def _group(group: dict[str, Any], sets: dict[str, list[str]]) -> list[Family]:
    named = group["labels"]
    labels = (*(sets[named] if isinstance(named, str) else named), *group.get("more_labels", ()))
    kinds: tuple[Literal["gauge", "counter"], ...] = ("gauge", "counter")
    return [
        Family(
            name=name,
            kind=kind,
            own_labels=labels,
            collector=group["collector"],
            source=group["source"],
            date=group["date"],
            dcgm=group.get("dcgm", False),
            **({"help": row} if isinstance(row, str) else row),
        )
        for kind in kinds
        for name, row in group.get(kind, {}).items()
    ]


FAMILIES = _read()
