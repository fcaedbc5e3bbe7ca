"""What can be wrong about starting a node's agent, and about the memory that outlives its ranks.

CratonError (ValueError)
├── LaunchError: launch.json cannot be read or says something impossible
└── KeeperError: a node's keeper is gone, or cannot do what it was asked
"""

from __future__ import annotations

from craton.errors import CratonError


class LaunchError(CratonError):
    """The message says what was given, what is allowed and what to do."""


class KeeperError(CratonError):
    """Whoever gets it goes on without peer memory, out loud."""
