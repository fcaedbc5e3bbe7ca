"""What can go wrong with verifiers: the job is wrong, or this machine cannot run it."""

from __future__ import annotations

from craton.errors import CratonError


class VerifierError(CratonError):
    """A verifier is unknown or cannot be used, or too many samples got no verdict."""


class IsolationError(VerifierError):
    """This machine cannot isolate the code that a model wrote."""
