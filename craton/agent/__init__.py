"""The agent of a node starts, watches and ends the ranks of a run; the only writer of its node's files; torch-free.

It is a process, `python -m craton.agent RUN --node K`, told what to start by RUN/launch.json, which
`write_launch(run, Launch(...))` writes. Beside it a keeper holds the ranks' state in memory; ranks and agents talk to
it through a `KeeperClient`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.agent.errors import KeeperError, LaunchError, LaunchSchemaError
    from craton.agent.generation import Generation, newest_generation, next_number
    from craton.agent.launch import Launch, launch_text, parse_launch, read_launch, write_launch
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
