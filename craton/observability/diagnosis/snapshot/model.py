"""Everything that an examination of a run may look at, at one moment; and nothing else.

A snapshot is plain data: it can be saved, sent to somebody and examined again with the same verdict. Every value that a
machine may not tell is None (or empty), never zero, so that "no errors" and "not known" stay different. Moments are
epoch seconds; shares are 0 to 1; rates are per second. JSON has no word for NaN and infinity, and a loss may be either:
they are written as the texts "nan", "inf" and "-inf".
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache, cached_property
from typing import Any

from craton.errors import CratonError

SCHEMA = 1
PHASES = ("data", "compute", "communication", "optimizer", "checkpoint")


class SnapshotError(CratonError):
    """What was given is no saved snapshot."""


@dataclass(frozen=True)
class Restart:
    """A generation that began because something broke."""

    moment: float  # when it began
    broke_at: float  # when the one before stopped moving
    reason: str = ""  # in one line
    lost_seconds: float | None = None  # in noticing, coming back and doing steps again


@dataclass(frozen=True)
class RunFacts:
    """What is known of the run as a whole."""

    name: str
    kind: str = "pretrain"
    on: str = "local"  # local, slurm or kubernetes
    state: str = "running"  # of telemetry.RunState
    message: str = ""  # why it failed, was lost or stopped
    unsaved: str = ""  # that its last state is on no disk yet, and why
    rescued: str = ""  # of a run that has ended: where its last state lies instead of its tier, and why
    storage: str = ""  # what is or was wrong with the disk of its directory
    nodes: tuple[str, ...] = ()  # in the order of ranks
    ranks_per_node: int = 0
    leaves: dict[str, str] = field(default_factory=dict)  # node → leaf; without those that are not known
    layout: dict[str, int] = field(default_factory=dict)  # pp, replicate, fsdp, cp, tp, ep
    is_accelerated: bool | None = None  # whether ranks compute on GPUs
    generation: int = 0
    generation_began: float | None = None
    previous_began: float | None = None  # of the generation before it, since the run was last started
    restarts: int = 0  # generations that began because something broke
    recent_restarts: tuple[Restart, ...] = ()  # those of the last hour since the run was last started, oldest first
    step: int | None = None  # the newest that was finished
    steps: int | None = None
    updated_at: float | None = None  # of the newest metric
    plan: dict[str, float] = field(default_factory=dict)  # X → predicted, X of telemetry.TWINS
    step_seconds_low: float | None = None
    step_seconds_high: float | None = None
    # What collectives take by themselves: the least that any rank waits in a step, as a median over steps.
    collective_seconds: float | None = None
    collective_seconds_before: float | None = None
    ledger: dict[str, float] = field(default_factory=dict)  # wall seconds by kind
    dollars_per_hour: float | None = None
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)  # run, data, checkpoints → folders, where known
    has_ended: bool = False

    @property
    def world(self) -> int:
        return len(self.nodes) * self.ranks_per_node


@dataclass(frozen=True)
class NodeWord:
    """What a scheduler says of one node."""

    node: str
    state: str = ""  # its own word: ALLOCATED, DOWN, NotReady, ...
    reason: str = ""
    is_bad: bool = False  # nothing runs there: down, drained, not ready, gone


@dataclass(frozen=True)
class SchedulerKill:
    """A process, pod or job that the scheduler or the kernel ended."""

    reason: str  # oom, evicted, preempted, time_limit, node_fail, cancelled
    node: str = ""
    rank: int | None = None
    moment: float | None = None
    text: str = ""


@dataclass(frozen=True)
class SchedulerState:
    condition: str = "running"  # waiting, running, ended, unknown
    job: str = ""
    reason: str = ""
    sentence: str = ""
    outcome: str = ""
    expected_start: float | None = None
    restarts: int = 0
    nodes: tuple[NodeWord, ...] = ()
    kills: tuple[SchedulerKill, ...] = ()


@dataclass(frozen=True)
class SnapshotRank:
    """One rank: where it is, what it does and how long its steps take."""

    rank: int
    node: str
    gpu: int | None = None  # its index on the node
    pid: int | None = None
    is_alive: bool | None = None
    exit_code: int | None = None  # of one that ended; negative: the signal
    ended_at: float | None = None
    ended_in: str = ""  # the ledger's kind, and what went on beside it
    kind: str = ""  # of telemetry.LEDGER_KINDS: what it is doing now
    beside: tuple[str, ...] = ()
    progress_age_seconds: float | None = None  # since it last showed that it goes on
    progress_limit_seconds: float | None = None  # of that, after which its agent takes it for hung in what it does now
    is_stopped: bool | None = None  # by a signal
    process_state: str = ""  # R, S, D, T, Z as the kernel has it
    wait_channel: str = ""  # the kernel function it sleeps in
    step: int | None = None  # the newest that it has begun or finished
    step_seconds: float | None = None  # what a step takes it usually
    recorded_at: float | None = None  # when it last recorded a step
    recent: dict[str, float] = field(default_factory=dict)  # phase (or "step") → median seconds of the last steps
    earlier: dict[str, float] = field(default_factory=dict)  # the same of the steps before those, warm-up left out
    num_recent: int = 0  # steps behind `recent`
    num_earlier: int = 0
    work_deviation_seconds: float | None = None  # median absolute deviation of a recent step without communication
    memory_bytes: float | None = None
    gradient_norm: float | None = None  # of its own gradients, the median of the newest steps; nan: most have none
    gradient_norm_usual: float | None = None  # its own median before
    differs_from_copies: bool | None = None  # its state has another checksum than that of ranks with the same state
    stack: tuple[str, ...] = ()  # innermost first


@dataclass(frozen=True)
class SnapshotXid:
    """An error of a card, as the driver told it."""

    code: int
    moment: float | None = None
    text: str = ""
    recovery: str = ""  # what XID 154 asks for
    before_reload: bool = False  # the driver was loaded again since
    is_fatal: bool = False  # says so itself, as those of NVLink 5 do


@dataclass(frozen=True)
class SnapshotGpu:
    index: int
    throttle: tuple[str, ...] | None = None  # active reasons by nvidia-smi's names; idle is none
    throttled_share: float | None = None  # of the last minutes, by power, heat or the board
    sm_clock_mhz: float | None = None
    max_sm_clock_mhz: float | None = None
    utilisation: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    default_power_limit_watts: float | None = None
    memory_used_share: float | None = None
    uncorrectable_errors: int | None = None  # ECC, since the driver was loaded
    correctable_errors_per_hour: float | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    recovery_action: str = ""  # None, Reset, Reboot, ...: the driver's own word
    xids: tuple[SnapshotXid, ...] = ()
    nvlinks_up: int | None = None
    nvlinks: int | None = None
    nvlink_errors_per_second: float | None = None  # CRC, replay and recovery together
    pcie_share: float | None = None  # of the lanes and speed the slot could have
    pcie_replays_per_second: float | None = None
    uuid: str = ""


@dataclass(frozen=True)
class SnapshotFabricDevice:
    """A network card between nodes."""

    name: str
    is_active: bool | None = None
    sent_bytes_per_second: float | None = None
    retransmitted_share: float | None = None
    drops_per_second: float | None = None
    errors_per_second: float | None = None  # failed work requests, symbol errors, CRC
    peer_events: float | None = None  # peers that did not answer or were impaired, in the last minutes
    link_downs: float | None = None  # in the last minutes


@dataclass(frozen=True)
class SnapshotMount:
    """A file system that the run uses."""

    path: str
    kind: str = ""  # lustre, nfs, xfs, ...
    holds: tuple[str, ...] = ()  # data, checkpoints, run
    read_bytes_per_second: float | None = None
    write_bytes_per_second: float | None = None
    operation_seconds: float | None = None  # mean time of a read or write
    usual_operation_seconds: float | None = None
    metadata_seconds: float | None = None  # mean time of open, stat and the like
    usual_metadata_seconds: float | None = None
    busy_share: float | None = None  # of the time, operations were under way (a disk of this machine)
    full_share: float | None = None
    inodes_full_share: float | None = None
    is_stalled: bool | None = None  # its servers do not answer, or evicted this client
    is_read_only: bool | None = None
    interfaces: int | None = None  # network cards bound to it
    expected_interfaces: int | None = None


@dataclass(frozen=True)
class SnapshotHost:
    processors: int | None = None
    load: float | None = None  # processes that run or want to, one-minute mean
    processor_pressure: float | None = None  # share of the time that some process waited for a processor (PSI, 10 s)
    memory_pressure: float | None = None  # share of the time in which all processes waited for memory (PSI, full)
    steal_share: float | None = None  # of processor time that the hypervisor took
    memory_available_share: float | None = None
    swapped_bytes_per_second: float | None = None
    foreign_processor_share: float | None = None  # of the node's processors, used by processes that are not the run's
    blocked_processes: tuple[str, ...] | None = None  # in state D for long: names
    clock_offset_seconds: float | None = None
    out_of_memory_kills: int | None = None  # in the last quarter of an hour
    shared_memory_full_share: float | None = None


@dataclass(frozen=True)
class SnapshotNode:
    name: str
    leaf: str = ""
    host_name: str = ""
    heartbeat_age_seconds: float | None = None
    heartbeat_state: str = ""  # of telemetry.NodeState; "": none was seen
    agent_is_alive: bool | None = None  # where its process can be looked at
    stopped_agent: int | None = None  # the process of its agent, where a signal has stopped it
    gpus: tuple[SnapshotGpu, ...] = ()
    gpus_known: bool = False  # whether anybody told of the cards
    expected_gpus: int | None = None
    fabric: tuple[SnapshotFabricDevice, ...] = ()
    expected_fabric: int | None = None
    nccl_network: str = ""  # what NCCL says it uses: Socket, AWS Libfabric, IB, ...
    nccl_interfaces: int | None = None
    mounts: tuple[SnapshotMount, ...] = ()
    host: SnapshotHost | None = None


@dataclass(frozen=True)
class Serving:
    """What a server has to do, by what it records and by its own metrics where these can be read."""

    running: int = 0
    waiting: int = 0
    least_waiting: int | None = None  # of the last minute; None: it has told of less
    kv_share: float | None = None  # of the blocks for keys and values, in use
    preemptions: int | None = None  # requests that were taken out again, since it was started
    first_token_seconds: float | None = None  # median


@dataclass(frozen=True)
class Communicator:
    """A communicator as NCCL's RAS sees it, asked twice."""

    name: str
    size: int
    counts: dict[int, int] = field(default_factory=dict)  # rank → operations begun, at the second look
    counts_before: dict[int, int] = field(default_factory=dict)
    seconds_between: float | None = None
    missing: tuple[int, ...] = ()  # ranks whose process does not answer


@dataclass(frozen=True)
class StuckCollective:
    """The first collective of a process group that did not end, from the flight recorders of its ranks."""

    group: str
    sequence: int
    operation: str = ""
    description: str = ""
    expected: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()  # recorded their collectives and never entered this one
    silent: tuple[int, ...] = ()  # left no recording, where others of their node did
    mismatch: str = ""  # ranks entered different operations or sizes
    mismatched: tuple[int, ...] = ()
    stack: tuple[str, ...] = ()


@dataclass(frozen=True)
class Collectives:
    communicators: tuple[Communicator, ...] = ()
    stuck: tuple[StuckCollective, ...] = ()
    ras_asked: bool = False
    recorders_read: int = 0  # flight recorder files


@dataclass(frozen=True)
class SnapshotTier:
    """Checkpoints of one tier."""

    tier: str
    last_step: int | None = None
    last_moment: float | None = None
    last_seconds: float | None = None
    usual_seconds: float | None = None
    bytes_per_second: float | None = None  # of the last one
    usual_bytes_per_second: float | None = None
    interval_seconds: float | None = None  # planned
    failures: int = 0  # in a row, the newest ones
    skipped: int = 0  # in a row, because the one before was still being written
    reason: str = ""  # of the newest failure


@dataclass(frozen=True)
class Series:
    """How the run went: (step, value), oldest first, thinned, the newest steps whole."""

    loss: tuple[tuple[int, float], ...] = ()
    gradient_norm: tuple[tuple[int, float], ...] = ()
    step_seconds: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Event:
    """Something of note that was recorded."""

    name: str
    moment: float
    node: str = ""
    rank: int | None = None
    step: int | None = None
    generation: int | None = None
    text: str = ""


@dataclass(frozen=True)
class LogMatch:
    """A line of a log that means something, by the table of patterns."""

    pattern: str  # its name in the table
    line: str
    rank: int | None = None
    node: str = ""
    moment: float | None = None  # when the log was last written
    count: int = 1


@dataclass(frozen=True)
class Snapshot:
    moment: float
    run: RunFacts
    scheduler: SchedulerState = field(default_factory=SchedulerState)
    ranks: tuple[SnapshotRank, ...] = ()
    nodes: tuple[SnapshotNode, ...] = ()
    spares: tuple[
        SnapshotNode, ...
    ] = ()  # that wait to take a node's place; of these only their signs of life are known
    serving: Serving | None = None  # of a server that answers
    collectives: Collectives = field(default_factory=Collectives)
    tiers: tuple[SnapshotTier, ...] = ()
    series: Series = field(default_factory=Series)
    events: tuple[Event, ...] = ()
    logs: tuple[LogMatch, ...] = ()
    notes: tuple[str, ...] = ()  # what could not be looked at, and why
    schema: int = SCHEMA

    @cached_property
    def _node_of(self) -> dict[str, SnapshotNode]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def _rank_of(self) -> dict[int, SnapshotRank]:
        return {rank.rank: rank for rank in self.ranks}

    @cached_property
    def _rank_on(self) -> dict[tuple[str, int], int]:
        return {(rank.node, rank.gpu): rank.rank for rank in self.ranks if rank.gpu is not None}

    def node(self, name: str) -> SnapshotNode | None:
        return self._node_of.get(name)

    def rank(self, number: int) -> SnapshotRank | None:
        return self._rank_of.get(number)

    def rank_on(self, node: str, gpu: int) -> int | None:
        """Who computes on a card."""
        return self._rank_on.get((node, gpu))

    def to_json(self) -> str:
        return json.dumps(_plain(asdict(self)), allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Snapshot:
        """SnapshotError when the text is no snapshot, or one of another schema."""
        try:
            document = json.loads(text)
        except ValueError as error:
            raise SnapshotError(
                f"this is no saved snapshot: {error}; `craton why RUN --save FILE` writes one"
            ) from error
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            schema = document.get("schema") if isinstance(document, dict) else None
            raise SnapshotError(
                f"this is no snapshot of schema {SCHEMA} (it says {schema!r}); `craton why RUN --save FILE` writes one"
            )
        try:
            snapshot: Snapshot = _made(cls, document)
        except (TypeError, ValueError, KeyError) as error:
            raise SnapshotError(f"this snapshot cannot be read: {error}") from error
        return snapshot


def _plain(value: Any) -> Any:
    """As JSON can have it."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _made(kind: Any, value: Any) -> Any:
    """A value of this annotation from what JSON has of it."""
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, Mapping):
            raise TypeError(f"{kind.__name__} is written as an object, not as {value!r}")
        hints = hints_of(kind)
        return kind(**{name: _made(hints[name], content) for name, content in value.items() if name in hints})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _made(next(argument for argument in arguments if argument is not types.NoneType), value)
    if origin is tuple:
        if not isinstance(value, list):
            raise TypeError(f"{value!r} is not a list")
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_made(arguments[0], element) for element in value)
        return tuple(_made(entry, part) for entry, part in zip(arguments, value, strict=True))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise TypeError(f"{value!r} is not an object")
        return {arguments[0](key): _made(arguments[1], item) for key, item in value.items()}
    if kind is float:
        return float(value)
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is not {kind.__name__}")
    return value


@cache
def hints_of(kind: type) -> dict[str, Any]:
    """The types of the fields of a dataclass."""
    hints = typing.get_type_hints(kind)
    return {item.name: hints[item.name] for item in fields(kind)}
