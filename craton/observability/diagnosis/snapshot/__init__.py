"""Everything a diagnosis may look at, at one moment, as plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.observability.diagnosis.snapshot.cards import CardOccupant, with_occupants, with_visible_cards
    from craton.observability.diagnosis.snapshot.json_values import hints_of
    from craton.observability.diagnosis.snapshot.model import (
        STEP_PHASES,
        Collectives,
        Communicator,
        Event,
        LogMatch,
        NodeWord,
        RankError,
        Restart,
        RunFacts,
        SchedulerKill,
        SchedulerState,
        Series,
        Serving,
        Snapshot,
        SnapshotBadStep,
        SnapshotError,
        SnapshotFabricDevice,
        SnapshotGpu,
        SnapshotHost,
        SnapshotMount,
        SnapshotNode,
        SnapshotRank,
        SnapshotStuckRank,
        SnapshotTier,
        SnapshotXid,
        StepWindow,
        StuckCollective,
        TrainingFacts,
    )
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
