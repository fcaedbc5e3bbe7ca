"""`craton why`: a snapshot of a run, rules by layer, and a verdict that is a pure function of the snapshot.

`take_snapshot(run)` collects all evidence; `diagnose(snapshot)` is pure, so that a snapshot can be saved, shared and
diagnosed again with the same verdict.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.observability.diagnosis.root_cause import diagnose
    from craton.observability.diagnosis.symptoms import straggler_of
    from craton.observability.diagnosis.tables import LAYERS
    from craton.observability.diagnosis.verdict import Symptom, Verdict
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
