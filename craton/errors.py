"""The root of every error that a user's input can cause; the command line prints it as one line and exits 2."""

from __future__ import annotations


class CratonError(ValueError):
    """What was given, what is allowed, what to do."""
