"""Launch and manage runs: drafts, the backends `local`, `slurm` and `kubernetes`, following and changing runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.orchestration.backend import Standing, is_elsewhere, read_submission
    from craton.orchestration.backends import backend_of, service_of
    from craton.orchestration.errors import NoAnswerError, RunEndedError, RunStateError, StartError, UnsavedError
    from craton.orchestration.evaluation import endpoint_of, evaluation_job, evaluation_name
    from craton.orchestration.histograms import histogram_quantile
    from craton.orchestration.local import kill_agents, living_agents, start_agents, with_cards
    from craton.orchestration.node_maintenance import NodeService, ServiceNode
    from craton.orchestration.process_commands import agent_command
    from craton.orchestration.run_files import stopped_by_scheduler, stopped_by_user
    from craton.orchestration.server import (
        ServerAddress,
        ServerState,
        ServerWatch,
        Stages,
        address_of,
        serve_job,
        server_name,
        server_of,
    )
    from craton.orchestration.server_targets import ServerTargets
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
