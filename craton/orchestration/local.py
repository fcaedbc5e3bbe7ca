"""The backend `local`: every node of the job is an agent on this machine, a process that outlives the command.

An agent has its own session and no terminal, so neither Ctrl-C nor a closed shell ends it. Who they are stands in
`agents.json` with each process's start time, so that a number that the system has given to another process since is
never taken for an agent, let alone killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from craton.agent import Launch
from craton.infrastructure import visible_accelerators
from craton.orchestration.draft import agent_command
from craton.orchestration.errors import StartError
from craton.telemetry import RunDirectory

MOVING = ("starting", "running", "stopping")  # states of a run whose agents should live
AGENTS_FILE = "agents.json"
KILL_SECONDS = 5.0  # a killed process is gone in milliseconds, unless it waits for a disk


@dataclass(frozen=True)
class AgentProcess:
    """One node agent, as started."""

    node: str
    pid: int
    started: str  # by the system's own clock; "" where it does not tell
    host: str

    @property
    def is_alive(self) -> bool:
        if self.host != socket.gethostname():
            return False
        state, started = _process(self.pid)
        return state not in ("", "Z", "X") and started == self.started

    @property
    def log(self) -> str:
        return agent_log(self.node)


def agent_log(node: str) -> str:
    return f"logs/agent-{node}.log"


def start_agents(run: RunDirectory, launch: Launch) -> list[AgentProcess]:
    """Start one agent a node, each in a session of its own, and write down who they are."""
    (run.path / "logs").mkdir(exist_ok=True)
    agents = []
    for number, node in enumerate(launch.nodes):
        with open(run.path / agent_log(node), "ab") as log:
            process = subprocess.Popen(
                agent_command(run.path, number),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **_own_gpus(launch, number)},
            )
        agents.append(AgentProcess(node, process.pid, _process(process.pid)[1], socket.gethostname()))
    partial = run.path / f"{AGENTS_FILE}.partial"
    partial.write_text(json.dumps([asdict(agent) for agent in agents], indent=1) + "\n", encoding="utf-8")
    os.replace(partial, run.path / AGENTS_FILE)
    return agents


def read_agents(run: RunDirectory) -> list[AgentProcess]:
    """The agents of the newest generation; none where the file is missing or torn."""
    try:
        return [AgentProcess(**each) for each in json.loads((run.path / AGENTS_FILE).read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return []


def living_agents(run: RunDirectory) -> list[AgentProcess]:
    return [agent for agent in read_agents(run) if agent.is_alive]


def kill_agents(run: RunDirectory) -> list[AgentProcess]:
    """Kill every agent that lives with all that descends from it. Returns those that were alive."""
    alive = living_agents(run)
    for pid in (pid for agent in alive for pid in _family(agent.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + KILL_SECONDS
    while living_agents(run) and time.monotonic() < deadline:
        time.sleep(0.02)
    return alive


def check_machine(launch: Launch) -> None:
    """Refuse ranks that this machine has no GPUs for."""
    there = len(visible_accelerators()) if launch.gpus else 0
    if launch.gpus and there < launch.world_size:
        raise StartError(
            f"this job needs {launch.world_size} GPUs, and this machine shows {there}; write `cluster: local x 1` to "
            "run on what it has"
        )


def free_port() -> int:
    """A TCP port of this machine that nothing listens on."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _own_gpus(launch: Launch, node: int) -> dict[str, str]:
    """Nodes that share this machine share its GPUs: each sees only its own, as it would on machines of its own."""
    if not launch.gpus or len(launch.nodes) == 1:
        return {}
    count = launch.ranks_per_node
    cards = visible_accelerators()[node * count : (node + 1) * count]
    return {"CUDA_VISIBLE_DEVICES": ",".join(card.uuid for card in cards)}


def _family(pid: int) -> list[int]:
    """A process and all its descendants, ancestors first, so that none can start another that is not yet listed."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    for line in listed.splitlines():
        child, parent = map(int, line.split())
        children.setdefault(parent, []).append(child)
    family = [pid]
    for member in family:
        family += children.get(member, [])
    return family


def _process(pid: int) -> tuple[str, str]:
    """(state letter, start time) of a process; ("", "") when there is none."""
    try:
        # The name in brackets may hold spaces and brackets itself: fields are counted from the last one (proc(5)).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return "", ""
    listed = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    state, _, started = listed.stdout.strip().partition(" ")
    return state[:1], started.strip()
