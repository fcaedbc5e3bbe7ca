"""Wall clocks of nodes that are off: named as a risk, and never taken for a lost node."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_snapshots import healthy

from craton.observability.diagnosis import diagnose
from craton.observability.diagnosis.snapshot import Snapshot

HOUR = 3600.0


def with_offsets(*offsets: float) -> Snapshot:
    snapshot = healthy(len(offsets))
    nodes = [replace(node, clock_offset_seconds=offset) for node, offset in zip(snapshot.nodes, offsets, strict=True)]
    return replace(snapshot, nodes=tuple(nodes))


@pytest.mark.parametrize(("offset", "words"), [(HOUR, "1h ahead of"), (-40.0, "40 s behind")])
def test_one_node_is_off(offset: float, words: str) -> None:
    verdict = diagnose(with_offsets(0.0, offset, 0.1))
    assert (verdict.condition, verdict.layer, verdict.cause, verdict.node) == ("healthy", "host", "clock_off", "node-1")
    assert words in verdict.because


def test_all_nodes_are_off_alike() -> None:
    verdict = diagnose(with_offsets(HOUR, HOUR + 0.2))
    assert (verdict.cause, verdict.node) == ("clock_off", "")
    assert "all nodes" in verdict.because


def test_clocks_that_differ_by_a_second_are_usual() -> None:
    assert diagnose(with_offsets(0.0, 1.0, -1.0)).cause == ""
