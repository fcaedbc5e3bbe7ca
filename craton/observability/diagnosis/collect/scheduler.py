"""Collect the scheduler's state of a run and of its nodes.

Node states on Slurm come from one `sinfo`; if it does not respond in time they stay unknown.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from craton.observability.diagnosis.snapshot import NodeWord, SchedulerKill, SchedulerState
from craton.orchestration import Standing

ASK_SECONDS = 10.0
SINFO = ("sinfo", "--noheader", "--Node", "--format=%N|%T|%E")
# Slurm states of nodes that run nothing; a draining node that still runs a job is not among them.
BAD_STATES = ("down", "fail", "failing", "error", "unknown", "drained", "no_respond", "power_down", "powered_down")
NO_REASON = ("none", "(null)", "")


def scheduler_of(standing: Standing, on: str, hosts: Mapping[str, str]) -> SchedulerState:
    """Return the scheduler's state. `hosts`: node of the run → its name in the scheduler."""
    words = f"{standing.reason} {standing.sentence}".upper()
    is_memory = standing.condition == "ended" and ("OUT_OF_MEMORY" in words or "OOMKILLED" in words)
    node_states = node_words(_sinfo(), hosts) if on == "slurm" and standing.condition != "waiting" else []
    known_hosts = {hosts[word.node] for word in node_states}
    names = {host: node for node, host in hosts.items()}
    return SchedulerState(
        condition=standing.condition,
        job=standing.job,
        reason=standing.reason,
        sentence=standing.sentence,
        outcome=standing.outcome,
        expected_start=standing.expected_start,
        restarts=standing.restarts,
        is_suspended=standing.is_suspended,
        has_begun=standing.has_begun,
        nodes=(
            *node_states,
            *(NodeWord(names.get(host, host), "ALLOCATED") for host in standing.nodes if host not in known_hosts),
        ),
        kills=(SchedulerKill("oom", text=standing.reason),) if is_memory else (),
    )


def node_words(text: str, hosts: Mapping[str, str]) -> list[NodeWord]:
    """Parse `sinfo` for the hosts of a run; each host once, although it may be in many partitions."""
    words: dict[str, NodeWord] = {}
    nodes: dict[str, list[str]] = {}
    for node, host in hosts.items():
        nodes.setdefault(host, []).append(node)
    for line in text.splitlines():
        host, _, rest = line.strip().partition("|")
        state, _, reason = rest.partition("|")
        for name in nodes.get(host, ()):
            # A trailing character is a flag: * not responding, ~ # ! % power states.
            plain = state.rstrip("*~#!%$@^-").lower()
            is_bad = plain in BAD_STATES or state.endswith("*")
            words[name] = NodeWord(name, state, "" if reason.lower() in NO_REASON else reason, is_bad)
    return list(words.values())


def _sinfo() -> str:
    try:
        completed = subprocess.run(SINFO, capture_output=True, text=True, timeout=ASK_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return completed.stdout if completed.returncode == 0 else ""
