"""What a user can get wrong about hardware.

CratonError (ValueError)
└── CatalogError: an unknown name, or a catalog or cluster file that says something impossible
"""

from __future__ import annotations

from craton.job import CratonError


class CatalogError(CratonError):
    """The message says what was given, what is allowed and what to do."""
