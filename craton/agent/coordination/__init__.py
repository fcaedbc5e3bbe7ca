"""Agents of a run agree on its members: leader election, signed messages; one agent makes a generation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.agent.coordination.coordinator import (
        SILENT_SECONDS,
        Action,
        Coordinator,
        Fail,
        Finish,
        Notice,
        RankFailure,
        Release,
        StartGeneration,
    )
    from craton.agent.coordination.excluded_nodes import (
        AVOID_FILE,
        avoid_node,
        forget_avoided,
        read_avoided,
        welcome_node,
    )
    from craton.agent.coordination.hangs import HANG_STEPS, RankProgress
    from craton.agent.coordination.leader_election import Claimed, Followed, Heard, LeaderElection
    from craton.agent.coordination.wire import Link, Message, Strangers, check_secret, own_address, run_secret
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
