"""Commands of the processes that look after a run: the agent of a node, and the manager of the runs that it owns."""

from __future__ import annotations

import sys
from pathlib import Path


def agent_command(run: Path, node: int | None = None) -> list[str]:
    """Return the command of a node's agent; without `node`, leave out the number at the end."""
    number = [] if node is None else [str(node)]
    return [sys.executable, "-m", "craton.agent", str(run), "--node", *number]


def manager_command(run: Path, *options: str, python: str = sys.executable) -> list[str]:
    """Return the command of the member manager of a run."""
    return [python, "-m", "craton.orchestration.members", str(run), *options]
