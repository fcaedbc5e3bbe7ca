"""The dashboards, one file each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.observability.dashboards.boards.all_boards import BOARDS
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
