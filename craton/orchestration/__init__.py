"""Where runs happen: drafts of what would be started, the backend `local` that starts it, and following it."""

from craton.agent import free_port
from craton.orchestration.chaos import arm_faults, faults_for, fired_faults, random_faults_for, what_happens
from craton.orchestration.comparison import Compared, compare
from craton.orchestration.draft import STOP_AT, Draft, agent_command, draft_run, named_job, with_chaos
from craton.orchestration.errors import RunStateError, StartError
from craton.orchestration.local import AgentProcess, agent_log, check_machine, living_agents, read_agents
from craton.orchestration.recoveries import Recoveries, Recovery, read_recoveries
from craton.orchestration.recovery_bench import CASES as RECOVERY_CASES
from craton.orchestration.recovery_bench import SHOWN_KINDS as RECOVERY_KINDS
from craton.orchestration.recovery_bench import Case, bench_recover
from craton.orchestration.resize import Resize, draft_resize, has_resized, resize_run, resized_nodes
from craton.orchestration.runs import (
    SavedStep,
    check_name_is_free,
    check_places,
    check_server,
    draft_resume,
    kill_run,
    newest_checkpoint,
    prepare_data,
    resume_run,
    resumed_job,
    start_run,
    stop_run,
)
from craton.orchestration.server import (
    READY,
    ServerAddress,
    ServerState,
    ServerWatch,
    Stages,
    address_of,
    is_server,
    serve_job,
    server_name,
)
from craton.orchestration.sizes import Size
from craton.orchestration.start import run
from craton.orchestration.state import wait_for_agents
from craton.orchestration.watch import Follower, View

__all__ = [
    "READY",
    "RECOVERY_CASES",
    "RECOVERY_KINDS",
    "STOP_AT",
    "AgentProcess",
    "Case",
    "Compared",
    "Draft",
    "Follower",
    "Recoveries",
    "Recovery",
    "Resize",
    "RunStateError",
    "SavedStep",
    "ServerAddress",
    "ServerState",
    "ServerWatch",
    "Size",
    "Stages",
    "StartError",
    "View",
    "address_of",
    "agent_command",
    "agent_log",
    "arm_faults",
    "bench_recover",
    "check_machine",
    "check_name_is_free",
    "check_places",
    "check_server",
    "compare",
    "draft_resize",
    "draft_resume",
    "draft_run",
    "faults_for",
    "fired_faults",
    "free_port",
    "has_resized",
    "is_server",
    "kill_run",
    "living_agents",
    "named_job",
    "newest_checkpoint",
    "prepare_data",
    "random_faults_for",
    "read_agents",
    "read_recoveries",
    "resize_run",
    "resized_nodes",
    "resume_run",
    "resumed_job",
    "run",
    "serve_job",
    "server_name",
    "start_run",
    "stop_run",
    "wait_for_agents",
    "what_happens",
    "with_chaos",
]
