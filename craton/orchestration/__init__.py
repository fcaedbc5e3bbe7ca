"""Where runs happen: drafts of what would be started, the backend `local` that starts it, and following it."""

from craton.orchestration.comparison import Compared, compare
from craton.orchestration.draft import STOP_AT, Draft, agent_command, draft_run, named_job
from craton.orchestration.errors import RunStateError, StartError
from craton.orchestration.local import AgentProcess, agent_log, check_machine, free_port, living_agents, read_agents
from craton.orchestration.runs import (
    SavedStep,
    check_name_is_free,
    check_places,
    draft_resume,
    kill_run,
    newest_checkpoint,
    prepare_data,
    resume_run,
    resumed_job,
    start_run,
    stop_run,
    wait_for_agents,
)
from craton.orchestration.start import run
from craton.orchestration.watch import Follower, View

__all__ = [
    "STOP_AT",
    "AgentProcess",
    "Compared",
    "Draft",
    "Follower",
    "RunStateError",
    "SavedStep",
    "StartError",
    "View",
    "agent_command",
    "agent_log",
    "check_machine",
    "check_name_is_free",
    "check_places",
    "compare",
    "draft_resume",
    "draft_run",
    "free_port",
    "kill_run",
    "living_agents",
    "named_job",
    "newest_checkpoint",
    "prepare_data",
    "read_agents",
    "resume_run",
    "resumed_job",
    "run",
    "start_run",
    "stop_run",
    "wait_for_agents",
]
