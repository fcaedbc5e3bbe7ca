"""A layout that a foreign stack cannot be told.

CratonError(ValueError)
└── FrameworkError
"""

from __future__ import annotations

from craton.errors import CratonError
from craton.job.layout import Layout


class FrameworkError(CratonError):
    """The stack has no word for something that was asked for."""


def refuse(stack: str, layout: Layout, *sizes: str) -> None:
    """FrameworkError when one of these parts of a layout is used, and the stack does not have it."""
    used = [f"{name} {getattr(layout, name)}" for name in sizes if getattr(layout, name) > 1]
    if used:
        raise FrameworkError(f"{stack} does not have {' and '.join(used)}; give a layout without it")
