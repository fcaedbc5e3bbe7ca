"""Change an existing run: inject faults, evacuate a node, resize, remove."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.orchestration.changes.chaos import (
        arm_faults,
        faults_for,
        faults_left,
        fired_faults,
        random_faults_for,
        what_happens,
    )
    from craton.orchestration.changes.evacuation import (
        Evacuation,
        come_back,
        evacuate,
        hosts_of,
        plan_evacuation,
        working_nodes,
    )
    from craton.orchestration.changes.removal import Removal, plan_removal, remove_run
    from craton.orchestration.changes.resize import Resize, draft_resize, has_resized, resize_run, resized_nodes
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
