"""What can be wrong about starting a node's agent.

CratonError (ValueError)
└── LaunchError: launch.json cannot be read or says something impossible
"""

from __future__ import annotations

from craton.errors import CratonError


class LaunchError(CratonError):
    """The message says what was given, what is allowed and what to do."""
