"""What a node records: events, metrics, ledger, markers, heartbeat; each file has one writer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.agent.records.clock import continue_clock
    from craton.agent.records.node_status import NodePublisher
    from craton.agent.records.records import NodeRecords
    from craton.agent.records.state_writer import directory_identity
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
