"""launch.json: what the agents of a run start. Replaced as a whole; `craton resize` may add nodes while the run runs.

An invalid launch is refused when it is constructed, with every problem in the message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from craton.agent.errors import LaunchError, LaunchSchemaError
from craton.schema import SCHEMA, schema_problem
from craton.telemetry import RunDirectory
from craton.telemetry.files import read_regular, replace_text

RENAMED_MODULES = {"craton.ml.nursery": "craton.ml.fork_server"}  # before November 2026 → now
_NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Launch:
    """How a run is started: which nodes, how many ranks on each, their command, and what to do when one dies."""

    generation: int
    nodes: list[str]  # names; their position is the `--node K` of an agent
    ranks_per_node: int
    command: list[str]  # argv of every rank
    env: dict[str, str] = field(default_factory=dict)  # added to the agent's environment
    master_address: str = "127.0.0.1"
    master_port: int = 29500
    threads_per_rank: int = 1
    gpus: bool = False  # whether ranks use the GPUs of their node; False hides them, but see `hides_gpus`
    cards: dict[str, str] = field(default_factory=dict)  # node → its CUDA_VISIBLE_DEVICES, where nodes share a machine
    track: list[str] = field(default_factory=list)  # sinks that the first node's agent starts
    metrics_port: int = 0  # of the Prometheus endpoint; 0 takes any free one
    leaves: dict[str, str] = field(default_factory=dict)  # node → its leaf switch, for the label of metrics
    stop_grace_seconds: float = 120.0  # from SIGTERM to SIGKILL when a run is stopped: time to checkpoint
    failure_grace_seconds: float = 5.0  # the same for the other ranks of a run that failed
    early_seconds: float = 10.0  # a command that fails this soon after its first start is not retried
    num_nodes: int = 0  # nodes that work at a time, the others are spares; 0: all
    min_nodes: int = 0  # minimum for an elastic run; 0: not elastic
    layouts: dict[str, Any] = field(default_factory=dict)  # number of nodes → layout, if not the plan's
    nursery: list[str] = field(default_factory=list)  # argv of the fork server; []: `command` starts each rank
    standby: list[str] = field(default_factory=list)  # argv of a fork server that replaces dead ranks of `command`
    tries: int = 3  # consecutive restarts without a new step; 0: the first failure ends the run
    spare_seconds: float = 30.0  # how long to wait for a lost node before the run continues with fewer
    give_up_seconds: float = 600.0  # how long a run waits that cannot continue with fewer nodes
    agent_command: list[str] = field(default_factory=list)  # argv without the node's index, to restart a dead agent
    chaos: list[str] = field(default_factory=list)  # faults that the agents inject
    gpus_per_node: int = 0  # shared by the processes of a node; 0: one each
    workdir: str = ""  # where ranks run; "": where the agent was started
    exits_together: bool = False  # processes take each other down: their exit codes at a stop mean nothing
    progress: dict[str, Any] = field(default_factory=dict)  # how the progress of a job's own command is read
    nodes_per_gpu: int = 1  # above 1: nodes of one machine share a GPU
    dollars_per_day: float | None = None  # price of its nodes, for display; None: unknown
    members: list[str] = field(default_factory=list)  # argv of its member manager; []: it owns no runs
    starts_manager: bool = True  # its agents start that; False: a program of its scheduler does
    owner: str = ""  # directory of the run that owns this one; "": it stands alone
    owner_seconds: float = 60.0  # how long a member runs on after the last process that looks after its owner

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {getattr(self, name)!r}: {allowed}"
            for name, (is_fine, allowed) in _RULES.items()
            if not is_fine(getattr(self, name))
        ]
        if not problems and self.num_nodes > len(self.nodes):
            problems = [f"num_nodes is {self.num_nodes}: must not exceed the {len(self.nodes)} entries of nodes"]
        if problems:
            raise LaunchError("; ".join(problems))

    @property
    def working_nodes(self) -> int:
        return self.num_nodes or len(self.nodes)

    @property
    def is_own_command(self) -> bool:
        """Whether the ranks are a program of the user, whose exit codes mean what it likes."""
        return bool(self.workdir)

    @property
    def watched_rank(self) -> int | None:
        """The rank of a command in whose output steps are read; None: every rank reports its own."""
        return int(self.progress.get("rank") or 0) if self.progress.get("has_steps") else None

    @property
    def node_gpus(self) -> int:
        """GPUs that a node needs, if it has any."""
        return self.gpus_per_node or self.ranks_per_node

    @property
    def hides_gpus(self) -> bool:
        """Whether ranks must not see GPUs. A job's own command on a cluster sees what the scheduler gives it."""
        is_elsewhere = not self.agent_command
        return not self.gpus and not (self.workdir and is_elsewhere)

    @property
    def world_size(self) -> int:
        return self.working_nodes * self.ranks_per_node


def write_launch(run: RunDirectory, launch: Launch) -> None:
    """Replace the run's launch.json as a whole."""
    replace_text(run.launch_path, launch_text(launch))


def launch_text(launch: Launch) -> str:
    """Return the text of a launch.json."""
    return json.dumps({"schema": SCHEMA, **asdict(launch)}, indent=1) + "\n"


def read_launch(run: RunDirectory) -> Launch:
    """Read launch.json; LaunchError names the file and every problem in it."""
    try:
        content = read_regular(run.launch_path)
    except FileNotFoundError as error:
        raise LaunchError(f"{run.launch_path} does not exist; `craton resume {run.name}` rebuilds it") from error
    except OSError as error:
        raise LaunchError(
            f"{run.launch_path} cannot be read ({error}); `craton resume {run.name}` rebuilds it"
        ) from error
    return parse_launch(run, content)


def parse_launch(run: RunDirectory, content: bytes) -> Launch:
    """Parse the content of a launch.json; LaunchError as above."""
    path = run.launch_path
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise LaunchError(f"{path} cannot be read ({error}); `craton resume {run.name}` rebuilds it") from error
    if not isinstance(document, dict):
        kind = type(document).__name__
        raise LaunchError(f"{path} holds a {kind}, not a JSON object; `craton resume {run.name}` rebuilds it")
    if problem := schema_problem(document.pop("schema", None)):
        raise LaunchSchemaError(f"{path}: {problem}")
    allowed = [item.name for item in fields(Launch)]
    unknown = sorted(set(document) - set(allowed))
    missing = [name for name in ("generation", "nodes", "ranks_per_node", "command") if name not in document]
    if unknown or missing:
        problems = [f"{name!r} is missing" for name in missing] + [f"{name!r} is unknown" for name in unknown]
        raise LaunchError(f"{path}: {', '.join(problems)}; allowed: {', '.join(allowed)}")
    try:
        return _with_present_modules(Launch(**document))
    except LaunchError as error:
        raise LaunchError(f"{path}: {error}") from error


def _with_present_modules(launch: Launch) -> Launch:
    """Translate module names: a run submitted before a module was renamed may start or restart after it."""

    def renamed(words: list[str]) -> list[str]:
        is_module = len(words) > 2 and words[1] == "-m"
        return [*words[:2], RENAMED_MODULES.get(words[2], words[2]), *words[3:]] if is_module else words

    return replace(launch, nursery=renamed(launch.nursery))


def _is_integer(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_text_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_text_table(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(part, str) for pair in value.items() for part in pair)


def _are_nodes(value: Any) -> bool:
    return (
        _is_text_list(value)
        and 0 < len(value) == len(set(value))
        and all(_NODE_NAME.fullmatch(name) is not None for name in value)
    )


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "generation": (_is_integer(0, 2**31), "a whole number, 0 or more"),
    "nodes": (_are_nodes, "a list of unique names of letters, digits, '.', '_' and '-'"),
    "ranks_per_node": (_is_integer(1, 4096), "a whole number, 1 or more"),
    "command": (lambda value: _is_text_list(value) and bool(value), "a list of arguments, the program first"),
    "env": (_is_text_table, "an object of strings"),
    "master_address": (lambda value: isinstance(value, str) and bool(value), "a host name or address"),
    "master_port": (_is_integer(1, 65535), "a port from 1 to 65535"),
    "threads_per_rank": (_is_integer(1, 4096), "a whole number, 1 or more"),
    "gpus": (lambda value: isinstance(value, bool), "true or false"),
    "cards": (_is_text_table, "an object of node names and GPU lists such as '0,1'"),
    "track": (_is_text_list, "a list of sink names"),
    "metrics_port": (_is_integer(0, 65535), "a port from 1 to 65535, or 0 for any free one"),
    "leaves": (_is_text_table, "an object of node names and leaf switch names"),
    "stop_grace_seconds": (_is_seconds, "seconds, 0 or more"),
    "failure_grace_seconds": (_is_seconds, "seconds, 0 or more"),
    "early_seconds": (_is_seconds, "seconds, 0 or more"),
    "num_nodes": (_is_integer(0, 2**31), "a whole number, 0 or more"),
    "min_nodes": (_is_integer(0, 2**31), "a whole number, 0 or more"),
    "layouts": (lambda value: isinstance(value, Mapping), "an object of layouts by number of nodes"),
    "nursery": (_is_text_list, "a list of arguments, the program first"),
    "standby": (_is_text_list, "a list of arguments, the program first"),
    "tries": (_is_integer(0, 2**31), "a whole number, 0 or more"),
    "spare_seconds": (_is_seconds, "seconds, 0 or more"),
    "give_up_seconds": (_is_seconds, "seconds, 0 or more"),
    "agent_command": (_is_text_list, "a list of arguments, the program first"),
    "chaos": (_is_text_list, "a list of faults"),
    "gpus_per_node": (_is_integer(0, 4096), "a whole number, 0 or more"),
    "workdir": (lambda value: isinstance(value, str), "a folder"),
    "exits_together": (lambda value: isinstance(value, bool), "true or false"),
    "progress": (lambda value: isinstance(value, Mapping), "an object of progress settings"),
    "nodes_per_gpu": (_is_integer(1, 4096), "a whole number, 1 or more"),
    "dollars_per_day": (lambda value: value is None or _is_seconds(value), "dollars, 0 or more, or null"),
    "members": (_is_text_list, "a list of arguments, the program first"),
    "starts_manager": (lambda value: isinstance(value, bool), "true or false"),
    "owner": (lambda value: isinstance(value, str), "the directory of a run"),
    "owner_seconds": (_is_seconds, "seconds, 0 or more"),
}
