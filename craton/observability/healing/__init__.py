"""`craton heal`: find bad nodes of a cluster, decide what to do, do it within limits, and undo it.

`decide` is pure: it takes issues, nodes and the ledger, and returns one decision per node. `heal` observes, decides and
acts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.observability.healing.actions import MODES, Healing, heal, undo
    from craton.observability.healing.ledger import Ledger, repeat_offenders
    from craton.observability.healing.places import HealingScope, look, place_of, read_report
    from craton.observability.healing.policy import Decision
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
