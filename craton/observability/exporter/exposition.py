"""Samples and their exposition in Prometheus's text format 0.0.4.

prometheus-client is not used here for two reasons. It adds `_total` to every counter, but the DCGM and EFA names that
dashboards use have none. And it needs 28 µs per sample (4,500 samples: 125 ms of a core, on the machine named in
docs/exporter.md). A node with 192 CPUs and 32 NICs has thousands of samples, and one percent of a core at a scrape
every five seconds is 50 ms. Labels rarely change, so their text is cached between scrapes.
"""

from __future__ import annotations

from collections.abc import Iterable

from craton.observability.exporter.families import FAMILIES, NODE_LABELS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_KEPT = 50_000  # cached label texts; the cache is cleared when it exceeds this after weeks of jobs

# The family's name, the values of its own labels, the value.
Sample = tuple[str, tuple[str, ...], float]


class Page:
    """Format samples as text and add the node's labels to each."""

    def __init__(self, node: str, leaf: str) -> None:
        self._node = (node, leaf)
        self._kept: dict[tuple[str, tuple[str, ...]], str] = {}

    def text(self, samples: Iterable[Sample]) -> str:
        """Return the text, with families in the order of the table; the last of two samples with equal labels wins."""
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
        # Prometheus treats an empty label as absent, so it is omitted.
        inside = ",".join(f'{label}="{_escaped(value)}"' for label, value in pairs if value)
        return f"{name}{{{inside}}} " if inside else f"{name} "


def _number(value: float) -> str:
    """Format a number as Go parses it: +Inf, -Inf and NaN."""
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")
