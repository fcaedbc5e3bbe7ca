"""Errors of `craton observe`.

CratonError
  ObserveError   Prometheus or Alertmanager is missing or does not start; a port is taken; nothing to observe
"""

from __future__ import annotations

from craton.errors import CratonError


class ObserveError(CratonError):
    """The message names the option or program, the reason, and what to do."""
