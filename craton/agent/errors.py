"""What can be wrong about starting a node's agent, and about the memory that outlives its ranks.

CratonError (ValueError)
├── LaunchError: launch.json cannot be read or says something impossible
│   └── LaunchSchemaError: a newer Craton wrote it
└── KeeperError: a node's keeper is gone, or cannot do what it was asked
"""

from __future__ import annotations

from craton.errors import CratonError


class LaunchError(CratonError):
    """The message says what was given, what is allowed and what to do."""


class LaunchSchemaError(LaunchError):
    """launch.json has a schema that this version does not read: rebuilding it would lose what the newer one wrote."""


class KeeperError(CratonError):
    """Whoever gets it goes on without peer memory, out loud."""
