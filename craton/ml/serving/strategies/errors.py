"""What can go wrong with a strategy, beside its endpoint.

CratonError(ValueError)
└── StrategyRunError
    ├── LimitError     a limit cannot be kept, for example dollars without prices
    └── NoScoreError   no sample got a score
"""

from __future__ import annotations

from craton.errors import CratonError


class StrategyRunError(CratonError):
    """A strategy cannot be run, or has no answer."""


class LimitError(StrategyRunError):
    """A limit cannot be kept."""


class NoScoreError(StrategyRunError):
    """No sample got a score."""
