"""`craton heal`: what ails the nodes of a cluster, what is to be done about it, doing it within limits, and undoing it.

`decide` is pure: troubles, nodes and the ledger of lemons in, one decision a node out. `heal` looks, decides and acts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import loader

if TYPE_CHECKING:
    from craton.observability.healing.acting import MODES, Healing, heal, undo
    from craton.observability.healing.ledger import LedgerEntry, Ledger, LedgerError, lemons
    from craton.observability.healing.places import HealingScope, look, place_of, read_report
    from craton.observability.healing.policy import Decision, decide, most_out
    from craton.observability.healing.troubles import Trouble, of_doctor, of_verdict, rules
else:
    __getattr__ = loader(
        __name__,
        {
            "acting": ("MODES", "Healing", "heal", "undo"),
            "ledger": ("Entry", "Ledger", "LedgerError", "lemons"),
            "places": ("Place", "look", "place_of", "read_report"),
            "policy": ("Decision", "decide", "most_out"),
            "troubles": ("Trouble", "of_doctor", "of_verdict", "rules"),
        },
    )

__all__ = [
    "MODES",
    "Decision",
    "LedgerEntry",
    "Healing",
    "Ledger",
    "LedgerError",
    "HealingScope",
    "Trouble",
    "decide",
    "heal",
    "lemons",
    "look",
    "most_out",
    "of_doctor",
    "of_verdict",
    "place_of",
    "read_report",
    "rules",
    "undo",
]
