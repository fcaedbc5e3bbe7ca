"""A layout that another framework cannot express.

CratonError(ValueError)
└── FrameworkError
"""

from __future__ import annotations

from craton.errors import CratonError
from craton.job.layout import Layout


class FrameworkError(CratonError):
    """The framework has no option for something that the job requests."""


def refuse(stack: str, layout: Layout, *sizes: str) -> None:
    """Raise FrameworkError if the layout uses one of these dimensions, which the framework does not support."""
    used = [f"{name} {getattr(layout, name)}" for name in sizes if getattr(layout, name) > 1]
    if used:
        raise FrameworkError(f"{stack} does not support {' and '.join(used)}; use a layout without it")
