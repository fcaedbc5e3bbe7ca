"""Errors about hardware descriptions, topology, provisioning and storage.

CratonError (ValueError)
├── CatalogError: an unknown name, or an invalid catalog or cluster file
├── TopologyError: a topology cannot be parsed, or its source cannot be queried
├── ProvisionError: a cluster file lacks information to create the cluster; `.problems` lists all of it
└── StorageError: a store could not be read or written, after retries
    └── ObjectMissingError: the store works, but has no object of this name
"""

from __future__ import annotations

from collections.abc import Sequence

from craton.errors import CratonError


class CatalogError(CratonError):
    """The message says what was given, what is allowed and what to do."""


class TopologyError(CratonError):
    """The message says which source was queried or which text was read, and what to do."""


class ProvisionError(CratonError):
    """Problems of a cluster file for one kind of cluster, one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        assert problems, "a ProvisionError needs at least one problem"
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class StorageError(CratonError):
    """The message names the location, what was tried and what to do."""


class ObjectMissingError(StorageError):
    """There is no object of this name."""
