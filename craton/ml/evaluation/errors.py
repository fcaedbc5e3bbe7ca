"""Errors of evaluations that a user can cause and fix.

CratonError(ValueError)
└── EvaluationError     a suite's data, a model or a run cannot be evaluated or compared
"""

from __future__ import annotations

from craton.errors import CratonError


class EvaluationError(CratonError):
    """A suite's data, a model or a run cannot be evaluated or compared."""
