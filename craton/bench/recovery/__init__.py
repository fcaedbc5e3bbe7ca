"""`craton bench recover`: how long a small run on this machine takes to recover from a fault."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.bench.recovery.benchmark import CASES, SHOWN_KINDS, RecoveryCase, bench_recover
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
