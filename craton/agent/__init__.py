"""The agent of a node: starts the ranks of a run, watches them, records for them and ends them; torch-free.

It is a process, `python -m craton.agent RUN --node K`, told what to start by RUN/launch.json, which
`write_launch(run, Launch(...))` writes. Beside it a keeper holds the ranks' state in memory; ranks and agents talk to
it through a `KeeperClient`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import loader

if TYPE_CHECKING:
    from craton.agent.avoid import AVOID_FILE, avoid_node, forget_avoided, read_avoided, welcome_node
    from craton.agent.errors import KeeperError, LaunchError
    from craton.agent.generation import Generation, newest_generation, next_number
    from craton.agent.keeper import Keeper
    from craton.agent.launch import Launch, parse_launch, read_launch, write_launch
    from craton.agent.network import address_towards, pin_interfaces
    from craton.agent.nursery import NURSERY_VARIABLE, answer_requests
    from craton.agent.ports import free_port
    from craton.agent.process import EXIT_FINAL, RECORDING_VARIABLES, open_log
    from craton.agent.slots import BLOCK_BYTES, HEADER_BYTES, Committed, Holding, KeeperClient, OwnSlot
    from craton.agent.store import StoreClient, StoreError, StoreServer, StoreTimeoutError
    from craton.agent.wire import check_secret, run_secret
else:
    __getattr__ = loader(
        __name__,
        {
            "avoid": ("AVOID_FILE", "avoid_node", "forget_avoided", "read_avoided", "welcome_node"),
            "errors": ("KeeperError", "LaunchError"),
            "generation": ("Generation", "newest_generation", "next_number"),
            "keeper": ("Keeper",),
            "launch": ("Launch", "parse_launch", "read_launch", "write_launch"),
            "network": ("address_towards", "pin_interfaces"),
            "nursery": ("NURSERY_VARIABLE", "answer_requests"),
            "ports": ("free_port",),
            "process": ("EXIT_FINAL", "RECORDING_VARIABLES", "open_log"),
            "slots": ("BLOCK_BYTES", "HEADER_BYTES", "Committed", "Holding", "KeeperClient", "OwnSlot"),
            "store": ("StoreClient", "StoreError", "StoreServer", "StoreTimeoutError"),
            "wire": ("check_secret", "run_secret"),
        },
    )

__all__ = [
    "AVOID_FILE",
    "BLOCK_BYTES",
    "EXIT_FINAL",
    "HEADER_BYTES",
    "NURSERY_VARIABLE",
    "RECORDING_VARIABLES",
    "Committed",
    "Generation",
    "Holding",
    "Keeper",
    "KeeperClient",
    "KeeperError",
    "Launch",
    "LaunchError",
    "OwnSlot",
    "StoreClient",
    "StoreError",
    "StoreServer",
    "StoreTimeoutError",
    "address_towards",
    "answer_requests",
    "avoid_node",
    "check_secret",
    "forget_avoided",
    "free_port",
    "newest_generation",
    "next_number",
    "open_log",
    "parse_launch",
    "pin_interfaces",
    "read_avoided",
    "read_launch",
    "run_secret",
    "welcome_node",
    "write_launch",
]
