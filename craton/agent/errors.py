"""Errors of starting a node's agent, and of the keeper's memory that outlives its ranks.

CratonError (ValueError)
├── LaunchError: launch.json cannot be read or is invalid
│   └── LaunchSchemaError: a newer Craton wrote it
└── KeeperError: a node's keeper is gone, or cannot serve a request
"""

from __future__ import annotations

from craton.errors import CratonError


class LaunchError(CratonError):
    """The message says what was given, what is allowed and what to do."""


class LaunchSchemaError(LaunchError):
    """launch.json has a schema that this version cannot read; rebuilding it would lose what the newer version wrote."""


class KeeperError(CratonError):
    """The caller continues without peer memory, and reports it."""
