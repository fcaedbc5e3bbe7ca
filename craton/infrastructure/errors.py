"""What a user can get wrong about hardware, and what storage can refuse.

CratonError (ValueError)
├── CatalogError: an unknown name, or a catalog or cluster file that says something impossible
└── StorageError: a store could not be read or written, after what was worth trying
    └── ObjectMissingError: it works, but has no object of this name
"""

from __future__ import annotations

from craton.job import CratonError


class CatalogError(CratonError):
    """The message says what was given, what is allowed and what to do."""


class StorageError(CratonError):
    """The message says which place, what was tried and what to do."""


class ObjectMissingError(StorageError):
    """There is no object of this name."""
