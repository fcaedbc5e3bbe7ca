"""The snapshot: all evidence about a run at one moment.

A snapshot is plain data: it can be saved, shared and diagnosed again with the same verdict. A value that is not known
is None (or empty), never zero, so that "no errors" and "not known" stay different. Moments are epoch seconds; shares
are 0 to 1; rates are per second. JSON has no NaN or infinity, and a loss may be either: they are written as the strings
"nan", "inf" and "-inf".
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from functools import cached_property

from craton.errors import CratonError
from craton.observability.diagnosis.latencies import SnapshotLatencies
from craton.observability.diagnosis.member_facts import SnapshotMember
from craton.observability.diagnosis.snapshot.json_values import made_from, plain_values
from craton.telemetry import PHASES, ROLLOUT_PHASES
from craton.telemetry.node import PeerTraffic, ProcessResources

SCHEMA = 1
NOT_FINITE = re.compile(r"\bis -?(nan|inf)\b")  # in the reason of a bad step
STEP_PHASES: tuple[str, ...] = (*PHASES, *ROLLOUT_PHASES)


class SnapshotError(CratonError):
    """The input is not a saved snapshot."""


@dataclass(frozen=True)
class Restart:
    """A generation that began because something broke."""

    moment: float  # when it began
    broke_at: float  # when the previous generation stopped making progress
    reason: str = ""  # in one line
    lost_seconds: float | None = None  # in detection, recovery and repeated steps


@dataclass(frozen=True)
class SnapshotStuckRank:
    """Where a rank was when its agent took its stack, and did not make a step since."""

    rank: int
    text: str = ""  # in one line
    is_user_frame: bool = False  # the line of code is the user's own
    wait_channels: tuple[str, ...] = ()  # kernel functions in which its threads sleep

    @property
    def sentence(self) -> str:
        channels = ", ".join(self.wait_channels)
        return self.text + (f"; in the kernel: {channels}" if channels else "")


@dataclass(frozen=True)
class RunFacts:
    """Facts about the run as a whole."""

    name: str
    kind: str = "pretrain"
    on: str = "local"  # local, slurm or kubernetes
    state: str = "running"  # of telemetry.RunState
    message: str = ""  # why it failed, was lost or stopped
    unsaved: str = ""  # its last state is not stored yet, and why
    rescued: str = ""  # for a run that has ended: where its last state is instead of its tier, and why
    storage: str = ""  # problem of the file system of its directory
    nodes: tuple[str, ...] = ()  # in rank order
    ranks_per_node: int = 0
    leaves: dict[str, str] = field(default_factory=dict)  # node → leaf, where known
    layout: dict[str, int] = field(default_factory=dict)  # pp, replicate, fsdp, cp, tp, ep
    is_accelerated: bool | None = None  # whether ranks compute on GPUs
    generation: int = 0
    generation_began: float | None = None
    is_stopped_by_user: bool = False  # with `craton stop`
    is_stopped_by_scheduler: bool = False  # its time limit was near, or another job takes the nodes
    signalled: tuple[int, ...] = ()  # ranks that received SIGTERM in this generation, and not from their agents
    stuck: tuple[SnapshotStuckRank, ...] = ()  # ranks that others waited for at the end
    # Rank → peers that did not acknowledge what it sent when it was last stuck; of a run that has ended.
    unacknowledged: dict[int, tuple[PeerTraffic, ...]] = field(default_factory=dict)
    previous_began: float | None = None  # of the previous generation, since the run was last started
    restarts: int = 0  # generations that began because something broke
    recent_restarts: tuple[Restart, ...] = ()  # those of the last hour since the run was last started, oldest first
    step: int | None = None  # last finished step
    steps: int | None = None
    updated_at: float | None = None  # of the newest metric
    plan: dict[str, float] = field(default_factory=dict)  # name of telemetry.TWINS → predicted value
    step_seconds_low: float | None = None
    step_seconds_high: float | None = None
    # Time of the collectives themselves: minimum wait of any rank in a step, as a median over steps.
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
    """The state of one node, as the scheduler reports it."""

    node: str
    state: str = ""  # in the scheduler's terms: ALLOCATED, DOWN, NotReady, ...
    reason: str = ""
    is_bad: bool = False  # cannot run anything: down, drained, not ready, gone


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
    is_suspended: bool = False  # it has stopped the processes of the run, which keep their nodes
    has_begun: bool = True  # False: it has started the run, and nothing of it runs yet, for longer than usual
    nodes: tuple[NodeWord, ...] = ()
    kills: tuple[SchedulerKill, ...] = ()


@dataclass(frozen=True)
class StepWindow:
    """Some consecutive steps of a rank."""

    moment: float  # when its first step was recorded
    seconds: dict[str, float] = field(default_factory=dict)  # phase (or "step") → median seconds


@dataclass(frozen=True)
class SnapshotRank:
    """One rank: its place, activity and step times."""

    rank: int
    node: str
    gpu: int | None = None  # its index on the node
    pid: int | None = None
    is_alive: bool | None = None
    exit_code: int | None = None  # after it ended; negative: the signal
    ended_at: float | None = None
    was_ended: bool = False  # by its agent
    ended_in: str = ""  # activity (ledger kind), and background activities after `+`
    kind: str = ""  # current activity, of telemetry.LEDGER_KINDS
    beside: tuple[str, ...] = ()
    progress_age_seconds: float | None = None  # since it last made progress
    progress_limit_seconds: float | None = None  # after which its agent treats it as hung
    is_stopped: bool | None = None  # by a signal
    process_state: str = ""  # R, S, D, T, Z, by the kernel
    wait_channel: str = ""  # the kernel function it sleeps in
    step: int | None = None  # last step begun or finished
    step_seconds: float | None = None  # usual time of a step
    recorded_at: float | None = None  # when it last recorded a step
    recent: dict[str, float] = field(default_factory=dict)  # phase (or "step") → median seconds of the last steps
    earlier: dict[str, float] = field(default_factory=dict)  # the same for earlier steps, without warm-up
    num_recent: int = 0  # number of steps in `recent`
    num_earlier: int = 0
    work_deviation_seconds: float | None = None  # median absolute deviation of a recent step without communication
    memory_bytes: float | None = None
    gradient_norm: float | None = None  # of its own gradients, median of the newest steps; nan: most are not finite
    gradient_norm_usual: float | None = None  # its own median before
    differs_from_copies: bool | None = None  # its state has a different checksum than its replicas
    stack: tuple[str, ...] = ()  # innermost first
    last_line: str = ""  # of its output; only of a command that hangs or has ended
    printed_seconds: float | None = None  # since its last output; only of a command that runs
    slowest_seconds: float | None = None  # its slowest recent step
    starved_seconds: float | None = None  # since its last progress: no CPU for its threads
    patience_seconds: float | None = None  # without progress, that the job allows (`progress.hang`)
    phase_seconds: dict[str, float] = field(default_factory=dict)  # activity → longest recent stay in it
    is_eager: bool | None = None  # its first step compiles nothing
    frame: str = ""  # where it waits, by its agent: `source.py:14 in read: time.sleep(60)`
    is_user_frame: bool | None = None  # that frame is of the user's own code
    is_waiting: bool | None = None  # by its stack, it waits for other ranks in a collective
    wait_channels: tuple[str, ...] = ()  # kernel functions in which its threads slept when its stack was taken
    resources: ProcessResources | None = None  # what its process may use and uses
    peers: tuple[PeerTraffic, ...] = ()  # its TCP traffic with other machines
    windows: tuple[StepWindow, ...] = ()  # recent steps and overlapping ones before them, newest first


@dataclass(frozen=True)
class SnapshotXid:
    """A GPU error, as the driver reported it."""

    code: int
    moment: float | None = None
    text: str = ""
    recovery: str = ""  # recovery action of XID 154
    before_reload: bool = False  # the driver was reloaded since
    is_fatal: bool = False  # reported as fatal, as by NVLink 5


@dataclass(frozen=True)
class SnapshotGpu:
    index: int
    throttle: tuple[str, ...] | None = None  # active reasons by nvidia-smi's names, without idle
    throttled_share: float | None = None  # of the last minutes, by heat, reliability or board limits
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
    recovery_action: str = ""  # None, Reset, Reboot, ..., as the driver reports it
    xids: tuple[SnapshotXid, ...] = ()
    nvlinks_up: int | None = None
    nvlinks: int | None = None
    nvlink_errors_per_second: float | None = None  # CRC, replay and recovery together
    pcie_share: float | None = None  # link width over its maximum
    pcie_replays_per_second: float | None = None
    uuid: str = ""


@dataclass(frozen=True)
class SnapshotFabricDevice:
    """A network device (NIC) between nodes."""

    name: str
    is_active: bool | None = None
    sent_bytes_per_second: float | None = None
    retransmitted_share: float | None = None
    drops_per_second: float | None = None
    errors_per_second: float | None = None  # failed work requests, symbol errors, CRC
    peer_events: float | None = None  # unresponsive or impaired peers, in the last minutes
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
    busy_share: float | None = None  # of the time with operations in flight (a disk of this machine)
    full_share: float | None = None
    inodes_full_share: float | None = None
    is_stalled: bool | None = None  # its servers do not respond, or evicted this client
    is_read_only: bool | None = None
    interfaces: int | None = None  # network interfaces bound to it
    expected_interfaces: int | None = None


@dataclass(frozen=True)
class SnapshotHost:
    processors: int | None = None
    load: float | None = None  # runnable processes, one-minute mean
    processor_pressure: float | None = None  # share of time that some process waited for a CPU (PSI some, 10 s)
    memory_pressure: float | None = None  # share of time that all processes waited for memory (PSI full)
    steal_share: float | None = None  # of CPU time, taken by the hypervisor
    memory_available_share: float | None = None
    swapped_bytes_per_second: float | None = None
    foreign_processor_share: float | None = None  # of the node's CPUs, used by processes outside the run
    blocked_processes: tuple[str, ...] | None = None  # names of processes that stay in state D
    clock_offset_seconds: float | None = None
    out_of_memory_kills: int | None = None  # in the last quarter of an hour
    shared_memory_full_share: float | None = None


@dataclass(frozen=True)
class SnapshotNode:
    name: str
    leaf: str = ""
    host_name: str = ""
    heartbeat_age_seconds: float | None = None
    heartbeat_state: str = ""  # of telemetry.NodeState; "": no heartbeat was seen
    clock_offset_seconds: float | None = None  # of its agent's wall clock to this machine's or the file server's
    agent_is_alive: bool | None = None  # where its process can be inspected
    stopped_agent: int | None = None  # process id of its agent, if a signal has stopped it
    gpus: tuple[SnapshotGpu, ...] = ()
    gpus_known: bool = False  # whether the GPUs were observed
    expected_gpus: int | None = None
    fabric: tuple[SnapshotFabricDevice, ...] = ()
    expected_fabric: int | None = None
    nccl_network: str = ""  # network that NCCL reports: Socket, AWS Libfabric, IB, ...
    nccl_interfaces: int | None = None
    mounts: tuple[SnapshotMount, ...] = ()
    host: SnapshotHost | None = None
    address: str = ""  # where other nodes reach it


@dataclass(frozen=True)
class Serving:
    """Load of a server, from its records and, where they can be read, its metrics."""

    running: int = 0
    waiting: int = 0
    least_waiting: int | None = None  # minimum of the last minute; None: its records cover less
    kv_share: float | None = None  # of the KV cache blocks, in use
    preemptions: int | None = None  # preempted requests since it was started
    first_token_seconds: float | None = None  # median
    is_silent: bool = False  # it does not answer HTTP requests
    num_ended: int = 0  # requests that ended in the last half minute
    num_aborted: int = 0  # of these: their clients gave up before the first token
    num_failed: int = 0  # of these: ended with an error
    stall_seconds: float = 0.0  # for which a running request has got no token
    num_refused: int = 0  # requests that it answered with 429 in the last half minute
    is_loading: bool = False  # it is not ready for requests yet
    refusal: str = ""  # why it computes nothing: it is paused, asleep or without weights
    roofline: float | None = None  # planned over measured time of its steps, in the last seconds
    usual_roofline: float | None = None  # the same before
    tokens_per_second: float | None = None  # generated, of the newest record
    latencies: SnapshotLatencies | None = None  # None: not known, or no request yet


@dataclass(frozen=True)
class Communicator:
    """A communicator as reported by NCCL RAS, queried twice."""

    name: str
    size: int
    counts: dict[int, int] = field(default_factory=dict)  # rank → operations begun, at the second query
    counts_before: dict[int, int] = field(default_factory=dict)
    seconds_between: float | None = None
    missing: tuple[int, ...] = ()  # ranks whose process does not respond


@dataclass(frozen=True)
class StuckCollective:
    """The first unfinished collective of a process group, from the flight recorders of its ranks."""

    group: str
    sequence: int
    operation: str = ""
    description: str = ""
    expected: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()  # recorded collectives but never entered this one
    silent: tuple[int, ...] = ()  # left no recording, although other ranks of their node did
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
    """History of the run: (step, value), oldest first, downsampled except for the newest steps."""

    loss: tuple[tuple[int, float], ...] = ()
    gradient_norm: tuple[tuple[int, float], ...] = ()
    step_seconds: tuple[tuple[int, float], ...] = ()
    data_seconds: tuple[tuple[int, float], ...] = ()  # of a step: waiting for its data
    evaluation_loss: tuple[tuple[int, float], ...] = ()
    learning_rate: tuple[tuple[int, float], ...] = ()
    label_share: tuple[tuple[int, float], ...] = ()  # weight of the labels per token of the step
    distinct_row_share: tuple[tuple[int, float], ...] = ()  # among the newest rows of rank 0
    distinct_tokens: tuple[tuple[int, float], ...] = ()  # in a row of the step, of a few hundred tokens
    copied_label_share: tuple[tuple[int, float], ...] = ()  # labels of such a row that equal the token at their place
    idle_expert_share: tuple[tuple[int, float], ...] = ()  # of the experts, without a token in the step
    expert_load_ratio: tuple[tuple[int, float], ...] = ()  # tokens of the busiest expert over the mean
    results: dict[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)  # of post-training, by name


@dataclass(frozen=True)
class TrainingFacts:
    """What the job file says about training. None or empty: not written there, or not known."""

    objective: str = ""  # cross_entropy, or the user's `package.module:function`
    vocabulary: int | None = None
    source: str = ""  # the user's data source, `package.module:function`
    has_files: bool = False  # reads its data from files
    learning_rate: float | None = None  # peak of the schedule
    usual_learning_rate: float | None = None  # for this kind of training and this model
    warmup_steps: int = 0
    weight_decay: float = 0.0  # of AdamW: its product with the learning rate is the share that a step takes off weights
    policy: str = ""  # train.on_nan: skip, rollback or stop
    is_new: bool = False  # the weights start at random
    has_adapters: bool = False  # trains LoRA adapters
    tokens_per_expert: float | None = None  # mean number of tokens that an expert gets in a step, over all ranks


@dataclass(frozen=True)
class SnapshotBadStep:
    """A step whose loss or gradient was not finite, and where that began, as the ranks found out."""

    step: int
    reason: str
    policy: str = ""
    generation: int | None = None
    moment: float | None = None
    first_sample: int | None = None  # the global samples of the step
    last_sample: int | None = None
    sample: int | None = None  # the sample where it began
    origin: str = ""  # data, weights, activations, objective, gradients; "": not found
    part: str = ""  # the array of the data, the parameter or the module
    rank: int | None = None  # that found it
    is_alone: bool = False  # no other rank found anything, although they do the same work on other samples

    @property
    def is_not_finite(self) -> bool:
        """Whether it was NaN or Inf, and not a spike."""
        return bool(NOT_FINITE.search(self.reason))

    @property
    def place(self) -> str:
        """Where it began, in words; "" if that was not found."""
        sample = f"sample {self.sample:,}" if self.sample is not None else ""
        if self.origin == "data":
            return f"{self.part or 'a number'} of {sample or 'its data'} is NaN or Inf"
        if self.origin == "weights":
            return f"the weights of {self.part} are NaN or Inf"
        if self.origin == "activations":
            return f"the output of {self.part} is the first that is NaN or Inf" + (f", for {sample}" if sample else "")
        if self.origin == "objective":
            return f"the objective {self.part} returns NaN or Inf" + (f" for {sample}" if sample else "")
        if self.origin == "gradients":
            return f"the gradient of {self.part} is the first that is NaN or Inf"
        return ""


@dataclass(frozen=True)
class Event:
    """A notable event of the run."""

    name: str
    moment: float
    node: str = ""
    rank: int | None = None
    step: int | None = None
    generation: int | None = None
    text: str = ""


@dataclass(frozen=True)
class LogMatch:
    """A log line that matches a pattern of logs.toml."""

    pattern: str  # name of the pattern
    line: str
    rank: int | None = None
    node: str = ""
    moment: float | None = None  # when the log was last written
    count: int = 1


@dataclass(frozen=True)
class RankError:
    """Why a rank ended, in its own words. Ranks of one generation with the same error are one entry."""

    moment: float
    generation: int = 0
    node: str = ""
    rank: int | None = None  # the first one that reported it
    ranks: tuple[int, ...] = ()  # all of them, the first ones by time
    num_ranks: int = 1
    step: int | None = None
    phase: str = ""  # ledger kind, and background activities after `+`
    code: int | None = None  # exit code, negative: the signal; None: the process survived
    type: str = ""  # of the exception; "": none, or not Python
    message: str = ""
    errno: int | None = None
    path: str = ""  # file name of an OSError
    user_frame: str = ""  # innermost frame in the user's own code: `file:line in function`
    last_frame: str = ""
    outer: str = ""  # the exception that was raised because of this one
    is_echo: bool = False  # the consequence of another rank's end
    is_early: bool = False  # it exited with 0 before the run was done
    out_of_memory: str = ""  # limit of the memory, if the kernel's OOM killer acted when it was killed
    source: str = "rank"  # rank: by itself; log: read from its log; exit: by its exit code alone


@dataclass(frozen=True)
class Snapshot:
    moment: float
    run: RunFacts
    scheduler: SchedulerState = field(default_factory=SchedulerState)
    ranks: tuple[SnapshotRank, ...] = ()
    nodes: tuple[SnapshotNode, ...] = ()
    spares: tuple[SnapshotNode, ...] = ()  # spare nodes; only their heartbeats are known
    serving: Serving | None = None  # for a server with records
    collectives: Collectives = field(default_factory=Collectives)
    tiers: tuple[SnapshotTier, ...] = ()
    series: Series = field(default_factory=Series)
    events: tuple[Event, ...] = ()
    logs: tuple[LogMatch, ...] = ()
    notes: tuple[str, ...] = ()  # what could not be observed, and why
    schema: int = SCHEMA
    errors: tuple[RankError, ...] = ()  # since the run was last started, newest last
    training: TrainingFacts | None = None  # for a run of a training job that can be read
    bad_steps: tuple[SnapshotBadStep, ...] = ()  # since the run was last started: the first ones, then the newest
    members: tuple[SnapshotMember, ...] = ()  # those that the run depends on, or that its message names

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
        """Return the rank that computes on a GPU."""
        return self._rank_on.get((node, gpu))

    def to_json(self) -> str:
        return json.dumps(plain_values(asdict(self)), allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Snapshot:
        """Parse a saved snapshot. SnapshotError if the text is not a snapshot of this schema."""
        try:
            document = json.loads(text)
        except ValueError as error:
            raise SnapshotError(
                f"not a saved snapshot: {error}; write one with `craton why RUN --save FILE`"
            ) from error
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            schema = document.get("schema") if isinstance(document, dict) else None
            raise SnapshotError(
                f"not a snapshot of schema {SCHEMA} (got {schema!r}); write one with `craton why RUN --save FILE`"
            )
        try:
            snapshot: Snapshot = made_from(cls, document)
        except (TypeError, ValueError, KeyError) as error:
            raise SnapshotError(f"cannot read this snapshot: {error}") from error
        return snapshot
