"""Processes of a node: ranks, the fork server, the keeper; their output, network and CPU time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.agent.processes.connections import ConnectionReader
    from craton.agent.processes.cpuwait import CpuWait
    from craton.agent.processes.fork_server import FORK_SERVER_VARIABLE, ForkServer, ForkServerError, answer_requests
    from craton.agent.processes.network import (
        address_towards,
        down_interface,
        free_port,
        interface_of,
        is_loopback,
        pin_interfaces,
    )
    from craton.agent.processes.output import CommandOutput
    from craton.agent.processes.process import (
        DUMP,
        EXIT_FINAL,
        NCCL_POLICY,
        RECORD,
        RECORDING_VARIABLES,
        ChildProcess,
        RankProcess,
        adopt_orphans,
        end_sink,
        failure_text,
        fill,
        how_ended,
        open_log,
        pipe,
        rank_environment,
        reap,
        start_rank,
        start_sink,
    )
    from craton.agent.processes.resources import ResourceReader
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
