"""The agent of a node: starts the ranks of a run, watches them, records for them and ends them; torch-free.

It is a process, `python -m craton.agent RUN --node K`, told what to start by RUN/launch.json, which
`write_launch(run, Launch(...))` writes.
"""

from __future__ import annotations

from craton.agent.errors import LaunchError
from craton.agent.launch import Launch, read_launch, write_launch

__all__ = ["Launch", "LaunchError", "read_launch", "write_launch"]
