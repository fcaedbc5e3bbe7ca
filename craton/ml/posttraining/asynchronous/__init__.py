"""Asynchronous rollouts: generation beside training with bounded staleness, and a journal that loses no sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.ml.posttraining.asynchronous.journal import JournalEntry, JournalError, RolloutJournal
    from craton.ml.posttraining.asynchronous.open import open_asynchronous
    from craton.ml.posttraining.asynchronous.samples import AsynchronousSamples
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
