"""The base class of every error that user input can cause; the command line prints it on one line and exits with 2."""

from __future__ import annotations


class CratonError(ValueError):
    """The message says what was given, what is allowed and what to do."""
