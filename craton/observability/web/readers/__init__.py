"""Incremental readers of run directories for the page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.observability.web.readers.history import Curves, History
    from craton.observability.web.readers.logs import read_piece, sources
    from craton.observability.web.readers.nodes import BAD, NodeMember, Nodes, NodeView, read_member, topology
    from craton.observability.web.readers.ranks import COLUMNS, KEPT_LINES, MEAN_LINES, PHASES, RankTable, RankTails
    from craton.observability.web.readers.recorded_looks import RecordedLooks, joined, last_busy
    from craton.observability.web.readers.records import TROUBLE, Records
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
