"""The agent of a node: starts the ranks of a run, watches them, records for them and ends them; torch-free.

It is a process, `python -m craton.agent RUN --node K`, told what to start by RUN/launch.json, which
`write_launch(run, Launch(...))` writes. Beside it a keeper holds the ranks' state in memory; ranks and agents talk to
it through a `KeeperClient`.
"""

from __future__ import annotations

from craton.agent.errors import KeeperError, LaunchError
from craton.agent.generation import Generation, newest_generation, next_number
from craton.agent.keeper import Keeper
from craton.agent.launch import Launch, read_launch, write_launch
from craton.agent.nursery import NURSERY_VARIABLE, answer_requests
from craton.agent.ports import free_port
from craton.agent.process import EXIT_FINAL
from craton.agent.slots import BLOCK_BYTES, HEADER_BYTES, Committed, Holding, KeeperClient, OwnSlot
from craton.agent.wire import run_secret

__all__ = [
    "BLOCK_BYTES",
    "EXIT_FINAL",
    "HEADER_BYTES",
    "NURSERY_VARIABLE",
    "Committed",
    "Generation",
    "Holding",
    "Keeper",
    "KeeperClient",
    "KeeperError",
    "Launch",
    "LaunchError",
    "OwnSlot",
    "answer_requests",
    "free_port",
    "newest_generation",
    "next_number",
    "read_launch",
    "run_secret",
    "write_launch",
]
