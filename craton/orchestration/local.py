"""The backend `local`: every node of the job is an agent process on this machine that outlives the command.

An agent has its own session and no terminal, so neither Ctrl-C nor a closed shell ends it. Its PID and process start
time are in `agents.json`, or in the heartbeat of an agent that another one restarted. A PID that the system has reused
since is never taken for an agent, let alone killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from craton.agent import Launch, write_launch
from craton.agent.processes import open_log
from craton.formatting import counted
from craton.infrastructure import visible_accelerators
from craton.orchestration.backend import Standing, Submission
from craton.orchestration.errors import StartError
from craton.orchestration.preflight import check_local
from craton.orchestration.process_commands import agent_command
from craton.telemetry import RunDirectory, read_json
from craton.telemetry.files import STORAGE_ERRORS, UnsafeFileError, names_in, read_regular
from craton.telemetry.members import MEMBERS_FOLDER, living_manager
from craton.telemetry.node import Heartbeat, read_heartbeat, write_heartbeat

if TYPE_CHECKING:
    from craton.orchestration.draft import Draft

AGENTS_FILE = "agents.json"
KILL_SECONDS = 5.0  # a killed process is gone in milliseconds, unless it waits for a disk


@dataclass(frozen=True)
class AgentProcess:
    """A node agent's process."""

    node: str
    pid: int
    started: str  # by the system's clock; "" if unknown
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


class LocalBackend:
    """This machine as a backend."""

    name = "local"

    def check(self, draft: Draft, run: RunDirectory) -> None:
        check_machine(draft.launch)

    def files(self, draft: Draft, run: RunDirectory) -> dict[str, str]:
        return {}

    def command(self, draft: Draft, run: RunDirectory) -> list[list[str]]:
        return [agent_command(run.path, node) for node in range(len(draft.launch.nodes))]

    def submit(self, draft: Draft, run: RunDirectory) -> Submission:
        launch = with_cards(draft.launch)
        check_local(run, draft.job, launch)
        write_launch(run, launch)
        start_agents(run, launch)
        return Submission("local")

    def look(self, runs: Iterable[RunDirectory]) -> dict[str, Standing]:
        result = {}
        for run in runs:
            alive = tuple(agent.node for agent in living_agents(run))
            result[run.name] = Standing("running" if alive else "ended", nodes=alive)
        return result

    def stop(self, run: RunDirectory) -> None:
        """Do nothing: the agents see the STOP marker."""

    def kill(self, run: RunDirectory) -> None:
        """Kill the agents and write their final heartbeats for them. On a full disk that fails too: the
        run still ends, and is shown as lost."""
        for agent in kill_agents(run):
            before = read_heartbeat(run, agent.node)
            generation = before.generation if before else int(read_json(run.launch_path).get("generation") or 0)
            ended = Heartbeat(generation, "stopped", agent.pid, metrics_port=0)
            if before is not None:  # the ledger keeps its clock when the run is resumed
                ended = replace(ended, clock=before.clock, steady_offset=before.steady_offset)
            try:
                write_heartbeat(run, agent.node, ended)
            except OSError as error:
                if error.errno not in STORAGE_ERRORS:
                    raise


def agent_log(node: str) -> str:
    return f"logs/agent-{node}.log"


def start_agents(run: RunDirectory, launch: Launch, nodes: Iterable[int] | None = None) -> list[AgentProcess]:
    """Start one agent per node (all, or those at these positions), each in its own session, and record them in
    agents.json."""
    (run.path / "logs").mkdir(exist_ok=True)
    agents = []
    for number in range(len(launch.nodes)) if nodes is None else nodes:
        node = launch.nodes[number]
        with open_log(run.path / agent_log(node)) as log:
            process = subprocess.Popen(
                agent_command(run.path, number),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        agents.append(AgentProcess(node, process.pid, _process(process.pid)[1], socket.gethostname()))
    started = {agent.node for agent in agents}
    others = [] if nodes is None else [agent for agent in read_agents(run) if agent.node not in started]
    partial = run.path / f"{AGENTS_FILE}.partial"
    partial.write_text(json.dumps([asdict(agent) for agent in [*others, *agents]], indent=1) + "\n", encoding="utf-8")
    os.replace(partial, run.path / AGENTS_FILE)
    return agents


def read_agents(run: RunDirectory) -> list[AgentProcess]:
    """Return the agents in agents.json; empty if the file is missing or damaged."""
    try:
        return [AgentProcess(**load) for load in json.loads(read_regular(run.path / AGENTS_FILE))]
    except (OSError, ValueError, TypeError, RecursionError):
        return []


def living_agents(run: RunDirectory) -> list[AgentProcess]:
    """Return the agents in agents.json or with a heartbeat whose process lives, sorted by node name."""
    agents = {(agent.pid, agent.started): agent for agent in [*_beating_agents(run), *read_agents(run)]}
    return sorted((agent for agent in agents.values() if agent.is_alive), key=lambda agent: _in_order(agent.node))


def kill_agents(run: RunDirectory) -> list[AgentProcess]:
    """Kill every agent with all its descendants, and processes that a dead agent left, until none is left: an agent
    that another one was just starting is found in the next pass. Return the agents that were alive."""
    killed: dict[int, AgentProcess] = {}
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        alive = living_agents(run)
        killed |= {agent.pid: agent for agent in alive}
        pids = _families(run, [agent.pid for agent in alive])
        if not pids:
            break
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return list(killed.values())


def kill_manager(run: RunDirectory) -> None:
    """Kill the member manager of a run on this machine, and wait for a start of a member that it has begun."""
    manager = living_manager(run)
    if manager is not None and manager.is_alive_here:
        with contextlib.suppress(ProcessLookupError):
            os.kill(manager.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError), starting_members(run, KILL_SECONDS):
        pass


@contextlib.contextmanager
def starting_members(run: RunDirectory, seconds: float) -> Iterator[None]:
    """Hold the lock under which members of a run are started; TimeoutError if another process keeps it this long."""
    path = run.path / MEMBERS_FOLDER / ".start.lock"
    if not path.parent.is_dir():
        yield
        return
    deadline = time.monotonic() + seconds
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{path} is held by another process") from None
                time.sleep(0.02)
        yield


def check_machine(launch: Launch) -> None:
    """Refuse a launch that needs more GPUs than this machine has, or more parts of them."""
    there = len(visible_accelerators()) if launch.gpus else 0
    parts = there * launch.nodes_per_gpu
    if launch.nodes_per_gpu > 1 and parts < launch.working_nodes:
        raise StartError(
            f"{launch.nodes_per_gpu} nodes share each GPU of this run, so {counted(there, 'GPU')} of this machine have "
            f"room for {parts} nodes, not {launch.working_nodes}; `craton stop` it, then `craton resume` it with "
            f"--cluster 'local x {launch.working_nodes}'"
        )
    needed = len(launch.nodes) * launch.node_gpus  # a spare has its own
    if launch.gpus and launch.nodes_per_gpu == 1 and there < needed:
        spares = len(launch.nodes) - launch.working_nodes
        advice = "recover: {spares: 0}" if spares and there >= launch.world_size else "cluster: local x 1"
        raise StartError(
            f"this job needs {counted(needed, 'GPU')}, and this machine has {there}; write `{advice}` to run on what "
            "it has"
        )


def with_cards(launch: Launch) -> Launch:
    """Divide this machine's GPUs among its nodes: each sees only its own, as on separate machines, or the one that it
    shares. Spares share GPUs with nodes, from the first GPU on. Existing assignments stay."""
    if not launch.gpus or len(launch.nodes) == 1:
        return launch
    count, there = launch.node_gpus, [card.uuid for card in visible_accelerators()]
    if launch.nodes_per_gpu > 1:
        cards = {node: there[number // launch.nodes_per_gpu % len(there)] for number, node in enumerate(launch.nodes)}
    else:
        cards = {
            node: ",".join(there[number * count : (number + 1) * count]) for number, node in enumerate(launch.nodes)
        }
    return replace(launch, cards={**cards, **launch.cards})


def _beating_agents(run: RunDirectory) -> list[AgentProcess]:
    try:
        nodes = names_in(run.path / "heartbeat", "[!.]*")
    except UnsafeFileError:  # no agent can write a heartbeat there
        nodes = []
    result = []
    for node in nodes:
        beat = read_heartbeat(run, node)
        if beat is not None and beat.host and beat.started:
            result.append(AgentProcess(node, beat.pid, beat.started, beat.host))
    return result


def _families(run: RunDirectory, agents: Iterable[int]) -> list[int]:
    """Return these agents, all agents, fork servers and member managers of the run by command line, and all
    descendants, ancestors first, so that none can start another that is not yet listed. A process whose rank was just
    killed has lost its parent: its environment names the run."""
    listed = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,ppid=,stat=,args="], capture_output=True, text=True, check=True
    ).stdout
    # Runs from before November 2026 have fork servers named nursery.
    modules = r"agent|ml\.fork_server|ml\.nursery|orchestration\.members"
    options = r"--node \d+|--starter|--posttraining"
    of_run = re.compile(rf"\S+ -m craton\.({modules}) {re.escape(str(run.path))}( ({options}))?")
    family = list(agents)
    children: dict[int, list[int]] = {}
    for line in listed.splitlines():
        child, parent, state, *words = line.split(maxsplit=3)
        if state.startswith(("Z", "X")):
            continue
        children.setdefault(int(parent), []).append(int(child))
        if words and of_run.fullmatch(words[0].strip()) and int(child) not in family:
            family.append(int(child))
    family += [pid for pid in _with_environment(f"CRATON_RUN={run.path}") if pid not in family]
    for member in family:
        family += [child for child in children.get(member, []) if child not in family]
    return family


def _with_environment(word: str) -> list[int]:
    """Return other processes with this variable in their environment; on Linux only."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # gone, or another user's
            if f"\0{word}\0".encode() in b"\0" + path.read_bytes():
                pids.append(int(path.parent.name))
    return [pid for pid in pids if pid != os.getpid()]


def _in_order(node: str) -> tuple[str, int]:
    """Sort key that puts node-2 before node-10."""
    name, _, number = node.rpartition("-")
    return (name, int(number)) if number.isdecimal() else (node, 0)


def _process(pid: int) -> tuple[str, str]:
    """Return (state letter, start time) of a process; ("", "") if there is none."""
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
