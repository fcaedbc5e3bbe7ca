"""Collect a snapshot of a run: its files, this machine, its scheduler, Prometheus, NCCL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.observability.diagnosis.collect.prometheus import ask_prometheus, queries
    from craton.observability.diagnosis.collect.snapshot import chosen_run, read_snapshot, take_snapshot
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
