"""Where runs happen: drafts of what would be started, the backend `local` that starts it, and following it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import loader

if TYPE_CHECKING:
    from craton.agent import free_port
    from craton.orchestration.backend import Standing, Submission, is_elsewhere, read_submission
    from craton.orchestration.backends import backend_of, backend_of_run, pod_lines
    from craton.orchestration.chaos import arm_faults, faults_for, fired_faults, random_faults_for, what_happens
    from craton.orchestration.comparison import Compared, compare
    from craton.orchestration.copies import check_copies, copy_names, first_copy, start_copies
    from craton.orchestration.draft import (
        STOP_AT,
        Draft,
        agent_command,
        check_needs,
        draft_run,
        named_job,
        with_chaos,
    )
    from craton.orchestration.errors import NoAnswerError, RunEndedError, RunStateError, SchedulerError, StartError
    from craton.orchestration.evacuation import (
        Evacuation,
        come_back,
        evacuate,
        hosts_of,
        plan_evacuation,
        spare_nodes,
        working_nodes,
    )
    from craton.orchestration.glances import Glance, glance
    from craton.orchestration.local import AgentProcess, agent_log, check_machine, living_agents, read_agents
    from craton.orchestration.placement import Audit, audit, order_nodes
    from craton.orchestration.preflight import Diagnosis, diagnose, examine
    from craton.orchestration.preflight_finding import Expected, PreflightFinding, Severity, worst
    from craton.orchestration.preflight_nccl_log import check_nccl_log, diagnose_nccl_log, read_nccl_log
    from craton.orchestration.preflight_slurm import diagnose_nodes
    from craton.orchestration.recoveries import Recoveries, Recovery, read_recoveries
    from craton.orchestration.recovery_bench import CASES as RECOVERY_CASES
    from craton.orchestration.recovery_bench import SHOWN_KINDS as RECOVERY_KINDS
    from craton.orchestration.recovery_bench import RecoveryCase, bench_recover
    from craton.orchestration.removal import Removal, plan_removal, remove_run
    from craton.orchestration.resize import Resize, draft_resize, has_resized, resize_run, resized_nodes
    from craton.orchestration.roots import linking, root_of, sharing_doubt
    from craton.orchestration.runs import (
        SavedStep,
        check_name_is_free,
        check_places,
        check_server,
        draft_resume,
        find_rescue,
        kill_run,
        newest_checkpoint,
        prepare_data,
        release_run,
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
        histogram_quantile,
        serve_job,
        server_name,
        server_of,
    )
    from craton.orchestration.service import NodeService, ServiceNode
    from craton.orchestration.backends import service_of
    from craton.orchestration.sizes import Size
    from craton.orchestration.snapshot import code_summary
    from craton.orchestration.start import run
    from craton.orchestration.state import (
        MOVING,
        is_server,
        settled,
        settled_summaries,
        standing_of,
        standings_of,
        wait_for_agents,
    )
    from craton.orchestration.run_files import stopped_by_user
    from craton.orchestration.watch import Follower, View
else:
    __getattr__ = loader(
        __name__,
        {
            "backend": ("Standing", "Submission", "is_elsewhere", "read_submission"),
            "backends": ("backend_of", "backend_of_run", "pod_lines"),
            "chaos": ("arm_faults", "faults_for", "fired_faults", "random_faults_for", "what_happens"),
            "comparison": ("Compared", "compare"),
            "copies": ("check_copies", "copy_names", "first_copy", "start_copies"),
            "draft": ("STOP_AT", "Draft", "agent_command", "check_needs", "draft_run", "named_job", "with_chaos"),
            "errors": ("NoAnswerError", "RunEndedError", "RunStateError", "SchedulerError", "StartError"),
            "evacuation": (
                "Evacuation",
                "come_back",
                "evacuate",
                "hosts_of",
                "plan_evacuation",
                "spare_nodes",
                "working_nodes",
            ),
            "glances": ("Glance", "glance"),
            "local": ("AgentProcess", "agent_log", "check_machine", "living_agents", "read_agents"),
            "placement": ("Audit", "audit", "order_nodes"),
            "preflight": ("Diagnosis", "diagnose", "examine"),
            "preflight_finding": ("Expected", "Finding", "Severity", "worst"),
            "preflight_nccl_log": ("check_nccl_log", "diagnose_nccl_log", "read_nccl_log"),
            "preflight_slurm": ("diagnose_nodes",),
            "recoveries": ("Recoveries", "Recovery", "read_recoveries"),
            "recovery_bench": ("RECOVERY_CASES", "RECOVERY_KINDS", "Case", "bench_recover"),
            "removal": ("Removal", "plan_removal", "remove_run"),
            "resize": ("Resize", "draft_resize", "has_resized", "resize_run", "resized_nodes"),
            "roots": ("linking", "root_of", "sharing_doubt"),
            "runs": (
                "SavedStep",
                "check_name_is_free",
                "check_places",
                "check_server",
                "draft_resume",
                "find_rescue",
                "free_port",
                "kill_run",
                "newest_checkpoint",
                "prepare_data",
                "release_run",
                "resume_run",
                "resumed_job",
                "start_run",
                "stop_run",
            ),
            "server": (
                "READY",
                "ServerAddress",
                "ServerState",
                "ServerWatch",
                "Stages",
                "address_of",
                "histogram_quantile",
                "serve_job",
                "server_name",
                "server_of",
            ),
            "service": ("NodeService", "ServiceNode"),
            "sizes": ("Size",),
            "snapshot": ("code_summary",),
            "start": ("run",),
            "state": (
                "MOVING",
                "is_server",
                "settled",
                "settled_summaries",
                "standing_of",
                "standings_of",
                "stopped_by_user",
                "wait_for_agents",
            ),
            "watch": ("Follower", "View"),
        },
        {"RECOVERY_CASES": "CASES", "RECOVERY_KINDS": "SHOWN_KINDS"},
    )

__all__ = [
    "MOVING",
    "READY",
    "RECOVERY_CASES",
    "RECOVERY_KINDS",
    "STOP_AT",
    "AgentProcess",
    "Audit",
    "RecoveryCase",
    "Compared",
    "Diagnosis",
    "Draft",
    "Evacuation",
    "Expected",
    "PreflightFinding",
    "Follower",
    "Glance",
    "NoAnswerError",
    "NodeService",
    "Recoveries",
    "Recovery",
    "Removal",
    "Resize",
    "RunEndedError",
    "RunStateError",
    "SavedStep",
    "SchedulerError",
    "ServerAddress",
    "ServerState",
    "ServerWatch",
    "ServiceNode",
    "Severity",
    "Size",
    "Stages",
    "Standing",
    "StartError",
    "Submission",
    "View",
    "address_of",
    "agent_command",
    "agent_log",
    "arm_faults",
    "audit",
    "backend_of",
    "backend_of_run",
    "bench_recover",
    "check_copies",
    "check_machine",
    "check_name_is_free",
    "check_nccl_log",
    "check_needs",
    "check_places",
    "check_server",
    "code_summary",
    "come_back",
    "compare",
    "copy_names",
    "diagnose",
    "diagnose_nccl_log",
    "diagnose_nodes",
    "draft_resize",
    "draft_resume",
    "draft_run",
    "evacuate",
    "examine",
    "faults_for",
    "find_rescue",
    "fired_faults",
    "first_copy",
    "free_port",
    "glance",
    "has_resized",
    "histogram_quantile",
    "hosts_of",
    "is_elsewhere",
    "is_server",
    "kill_run",
    "linking",
    "living_agents",
    "named_job",
    "newest_checkpoint",
    "order_nodes",
    "plan_evacuation",
    "plan_removal",
    "pod_lines",
    "prepare_data",
    "random_faults_for",
    "read_agents",
    "read_nccl_log",
    "read_recoveries",
    "read_submission",
    "release_run",
    "remove_run",
    "resize_run",
    "resized_nodes",
    "resume_run",
    "resumed_job",
    "root_of",
    "run",
    "serve_job",
    "server_name",
    "server_of",
    "service_of",
    "settled",
    "settled_summaries",
    "sharing_doubt",
    "spare_nodes",
    "standing_of",
    "standings_of",
    "start_copies",
    "start_run",
    "stop_run",
    "stopped_by_user",
    "wait_for_agents",
    "what_happens",
    "with_chaos",
    "working_nodes",
    "worst",
]
