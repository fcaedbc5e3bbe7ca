"""The member manager: starts, watches, restarts and stops the runs that a run owns; torch-free.

It is a process, `python -m craton.orchestration.members RUN`. `decide` is its whole logic, a pure function of what it
sees; the other modules look and act.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.orchestration.members.decision import MemberView, OwnerView, decide
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
