"""Samples, and the text they are served as: Prometheus's text format 0.0.4.

prometheus-client is not used here for two reasons. It adds `_total` to every counter, and DCGM's and EFA's names that
dashboards know have none. And it needs 28 µs a sample (4,500 samples: 125 ms of a core, on the machine that
docs/exporter.md names), where a node of 192 processors and 32 network cards has thousands of them and one percent of a
core at a scrape every five seconds is 50 ms. Labels hardly ever change, so their text is kept from scrape to scrape.
"""

from __future__ import annotations

from collections.abc import Iterable

from craton.observability.exporter.families import FAMILIES, NODE_LABELS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_KEPT = 50_000  # texts of labels; when jobs have come and gone for weeks they are made anew

# The name of a family, the values of its own labels, the number.
Sample = tuple[str, tuple[str, ...], float]


class Page:
    """Samples to text, with the labels of the node on each."""

    def __init__(self, node: str, leaf: str) -> None:
        self._node = (node, leaf)
        self._kept: dict[tuple[str, tuple[str, ...]], str] = {}

    def text(self, samples: Iterable[Sample]) -> str:
        """Families in the order of the table; of two samples with equal labels the last counts."""
        if len(self._kept) > MAX_KEPT:
            self._kept.clear()
        kept = self._kept
        families: dict[str, dict[str, float]] = {}
        for name, labels, value in samples:
            start = kept.get((name, labels))
            if start is None:
                start = kept[(name, labels)] = self._start(name, labels)
            lines = families.get(name)
            if lines is None:
                lines = families[name] = {}
            lines[start] = value
        parts = []
        for name, family in FAMILIES.items():
            if name in families:
                parts.append(f"# HELP {name} {_help(family.help)}\n# TYPE {name} {family.kind}")
                parts += [f"{start}{_number(value)}" for start, value in families[name].items()]
        return "\n".join(parts) + "\n"

    def _start(self, name: str, labels: tuple[str, ...]) -> str:
        family = FAMILIES[name]
        assert len(labels) == len(family.own_labels), f"{name} has the labels {family.own_labels}, not {labels}"
        pairs = zip((*family.own_labels, *NODE_LABELS), (*labels, *self._node), strict=True)
        # An empty label is no label to Prometheus, and takes no room here.
        inside = ",".join(f'{label}="{_escaped(value)}"' for label, value in pairs if value)
        return f"{name}{{{inside}}} " if inside else f"{name} "


def _number(value: float) -> str:
    """As Go reads it: inf and nan are +Inf and NaN there."""
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")
