"""What a user can get wrong about hardware, and what storage can refuse.

CratonError (ValueError)
├── CatalogError: an unknown name, or a catalog or cluster file that says something impossible
├── TopologyError: what was said of the network cannot be understood, or nobody could be asked
├── ProvisionError: a cluster file that does not say what it takes to make the cluster; `.problems` lists all of it
└── StorageError: a store could not be read or written, after what was worth trying
    └── ObjectMissingError: it works, but has no object of this name
"""

from __future__ import annotations

from collections.abc import Sequence

from craton.errors import CratonError


class CatalogError(CratonError):
    """The message says what was given, what is allowed and what to do."""


class TopologyError(CratonError):
    """The message says who was asked or which text was read, and what to do."""


class ProvisionError(CratonError):
    """What a cluster file lacks or says wrongly for one kind of cluster, each as one line."""

    def __init__(self, problems: Sequence[str]) -> None:
        assert problems, "a ProvisionError needs at least one problem"
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class StorageError(CratonError):
    """The message says which place, what was tried and what to do."""


class ObjectMissingError(StorageError):
    """There is no object of this name."""
