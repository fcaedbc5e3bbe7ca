"""The agent of a node starts, watches and ends the ranks of a run; the only writer of its node's files; torch-free.

The agent is a process, `python -m craton.agent RUN --node K`. It reads what to start from RUN/launch.json, which
`write_launch(run, Launch(...))` writes. Next to it a keeper process holds the ranks' state in memory; ranks and agents
use it through a `KeeperClient`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.agent.errors import KeeperError, LaunchError, LaunchSchemaError
    from craton.agent.generation import Generation, newest_generation, next_number
    from craton.agent.launch import Launch, launch_text, parse_launch, read_launch, write_launch
    from craton.agent.owner import has_agents
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
