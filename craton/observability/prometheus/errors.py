"""What can go wrong with observing.

CratonError
  ObserveError   Prometheus or Alertmanager is missing or does not start; a port is taken; nothing to observe
"""

from __future__ import annotations

from craton.errors import CratonError


class ObserveError(CratonError):
    """What was asked for, why it cannot be, what to do."""
