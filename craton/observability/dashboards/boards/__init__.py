"""The boards, one file each."""

from craton.observability.dashboards.boards.all_boards import BOARDS

__all__ = ["BOARDS"]
