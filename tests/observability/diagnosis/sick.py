"""Runs with one fault each: what is changed in a healthy snapshot, and what a verdict must say of it.

A case is a cause, the condition, the victim and the snapshot. Every cause of the table has one at least.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from fake_snapshots import (
    MOMENT,
    asked_ras,
    healthy,
    hung,
    slowed,
    slowed_all,
    with_device,
    with_gpu,
    with_host,
    with_log,
    with_mount,
    with_node,
    with_nodes,
    with_rank,
    with_ranks,
    with_run,
    with_scheduler,
    with_tier,
    without_hardware,
)
from sick_rollouts import rollout_faults, rollout_run
from sick_runs import (
    FUNCTION,
    GPU,
    NODE,
    RANK,
    TRAINING,
    dead,
    latencies,
    mute,
    reported,
    restarted,
    serving,
    slow_node,
    slow_victim,
    stuck,
    with_losses,
    with_resources,
)

from craton.observability.diagnosis.member_facts import SnapshotMember
from craton.observability.diagnosis.snapshot import (
    NodeWord,
    RankError,
    SchedulerKill,
    Series,
    Snapshot,
    SnapshotBadStep,
    SnapshotNode,
    SnapshotRank,
    SnapshotStuckRank,
    SnapshotXid,
)
from craton.observability.diagnosis.tables import LAYERS
from craton.telemetry.node import PeerTraffic, ProcessResources

SLEEPS = ProcessResources(cpus=4, file_wait_share=1.0, idle_seconds=40.0)
PACE: dict[str, Any] = {"recent": {"step": 2.1}, "num_recent": 20, "earlier": {"step": 0.1}, "num_earlier": 16}
NO_PACE: dict[str, Any] = {"recent": {}, "num_recent": 0, "earlier": {}, "num_earlier": 0}
LIMIT = {"memory_limit_bytes": 2 << 30}


@dataclass(frozen=True)
class Case:
    name: str
    cause: str
    condition: str
    snapshot: Snapshot
    node: str = NODE
    rank: int | None = RANK


def cases() -> Iterator[Case]:
    yield from scheduler_cases()
    yield from device_cases()
    yield from fabric_cases()
    yield from collective_cases()
    yield from framework_cases()
    yield from training_cases()
    yield from storage_cases()
    yield from connection_cases()
    yield from host_cases()
    yield from reported_cases()
    yield from member_cases()
    yield from rollout_cases()


def rollout_cases() -> Iterator[Case]:
    """Post-training: samples and rewards that are wrong, a side that waits for the other, a rank that hangs in one."""
    for name, cause, condition, snapshot in rollout_faults():
        yield Case(name, cause, condition, snapshot, "", None)
    for kind, cause in (("rollout", "rollout_hung"), ("reward", "verifier_hung"), ("sync", "weight_sync_hung")):
        yield Case(f"in {kind}", cause, "hung", hung(rollout_run(), {RANK: kind}, seconds=7200.0))
        all_wait = hung(rollout_run(), dict.fromkeys(range(16), kind), seconds=7200.0)
        yield Case(f"all in {kind}", cause, "hung", all_wait, "", None)


def member_cases() -> Iterator[Case]:
    """A member breaks its owner, keeps it from starting, or slows it down."""
    lost = SnapshotMember("run/base", "failed", "done", True, True, message="exit code 3", condition="dead")
    for layer in LAYERS:
        member = replace(lost, layer=layer, because=f"a fault of the {layer}", action="fix it", confidence=0.9)
        ended = with_run(replace(healthy(4), members=(member,)), state="failed", message="member base failed")
        yield Case(f"member failed by {layer}", f"member_{layer}", "dead", ended, "", None)
    waits = with_run(with_ranks(healthy(4), lambda rank: SnapshotRank(rank.rank, rank.node)), state="starting")
    gated = replace(lost, is_named=False, because="the disk is full", layer="storage", action="fix it", confidence=0.9)
    yield Case("gate", "member_storage", "starting", replace(waits, members=(gated,)), "", None)
    silent = SnapshotMember("run/rollout-0", "lost", "ready", condition="dead", confidence=0.6)
    late = replace(slowed_all(without_hardware(healthy(4)), 40.0, "data"), members=(silent,))
    yield Case("no answers", "member_unexplained", "slow", late, "", None)


def scheduler_cases() -> Iterator[Case]:
    waits = with_run(healthy(4), state="waiting")
    sentence = "needs 4 nodes; 3 are free"
    yield Case(
        "queue", "waiting_for_nodes", "waiting", with_scheduler(waits, condition="waiting", sentence=sentence), "", None
    )
    down = (NodeWord("node-0", "ALLOCATED"), NodeWord(NODE, "DOWN*", "Not responding", is_bad=True))
    silent = with_node(hung(healthy(4), {}), NODE, heartbeat_age_seconds=90.0)
    yield Case("node is down", "node_down", "dead", with_scheduler(silent, nodes=down), rank=None)
    alone = with_scheduler(
        healthy(4), condition="unknown", reason="no_answer", sentence="squeue: Unable to contact slurm controller"
    )
    yield Case("no controller", "scheduler_unreachable", "healthy", alone, "", None)
    for reason, word in (
        ("preempted", "PREEMPTED"),
        ("time_limit", "TIMEOUT"),
        ("cancelled", "CANCELLED"),
        ("evicted", "Evicted"),
    ):
        ended = with_scheduler(healthy(4), condition="ended", reason=word, outcome="failed")
        yield Case(word, reason, "dead", with_run(ended, state="failed", message=f"its job ended: {word}"), "", None)
    left = with_scheduler(healthy(4), condition="ended", reason="FAILED")
    left = with_run(left, state="stopped", message="saved and stopped", is_stopped_by_scheduler=True)
    yield Case("time limit ahead", "time_limit", "stopped", left, "", None)
    ended = with_scheduler(healthy(4), condition="ended", reason="CANCELLED")
    yield Case("scancel", "cancelled", "stopped", with_run(ended, state="stopped", message="SIGTERM"), "", None)
    halted = with_scheduler(healthy(4), is_suspended=True, reason="SUSPENDED", sentence="Slurm has suspended job 7")
    yield Case("suspended", "job_suspended", "hung", with_run(halted, on="slurm"), "", None)
    late = with_scheduler(healthy(4), has_begun=False, sentence="Slurm started job 7 40 s ago")
    late = replace(late, ranks=tuple(SnapshotRank(rank.rank, rank.node) for rank in late.ranks))
    yield Case("prolog", "job_not_begun", "starting", with_run(late, on="slurm", state="starting", step=None), "", None)


def device_cases() -> Iterator[Case]:
    stands = hung(healthy(4), {RANK: "productive"})
    for code, cause in ((79, "gpu_lost"), (119, "gpu_error"), (95, "gpu_memory_error"), (48, "gpu_memory_error")):
        xid = (SnapshotXid(code, MOMENT - 900.0),)
        yield Case(f"xid {code}, hung", cause, "hung", with_gpu(stands, NODE, GPU, xids=xid))
        died = with_gpu(dead(), NODE, GPU, xids=(SnapshotXid(code, MOMENT - 8.0),))
        yield Case(f"xid {code}, dead", cause, "dead", died)
    loop = restarted(*[f"rank {RANK} on {NODE} was killed by SIGABRT (generation {number})" for number in range(4)])
    erring = with_gpu(loop, NODE, GPU, xids=(SnapshotXid(95, MOMENT - 190.0),))
    yield Case("xid 95 in a loop", "gpu_memory_error", "slow", erring)
    seven = with_nodes(stands, lambda node: replace(node, gpus=node.gpus[:-1]) if node.name == NODE else node)
    yield Case("7 of 8", "gpu_lost", "hung", seven)
    yield Case("asks for a reset", "gpu_error", "hung", with_gpu(stands, NODE, GPU, recovery_action="Drain and Reset"))
    yield Case("ecc", "gpu_memory_error", "dead", with_gpu(dead(), NODE, GPU, uncorrectable_errors=2))
    yield Case("remap failed", "gpu_memory_error", "healthy", with_gpu(healthy(4), NODE, GPU, remap_failed=True))
    heat = with_gpu(slow_victim(), NODE, GPU, throttle=("hw_thermal_slowdown",), temperature_celsius=91.0)
    yield Case("heat", "gpu_throttled", "slow", heat)
    yield Case("throttled often", "gpu_throttled", "slow", with_gpu(slow_victim(), NODE, GPU, throttled_share=0.4))
    yield Case("power", "gpu_power_capped", "slow", with_gpu(slow_victim(), NODE, GPU, power_limit_watts=400.0))
    yield Case("clock", "gpu_clock_low", "slow", with_gpu(slow_victim(), NODE, GPU, sm_clock_mhz=1100.0))
    yield Case("pcie", "pcie_degraded", "slow", with_gpu(slow_victim(), NODE, GPU, pcie_share=0.25))
    yield Case("checksum", "gpu_computes_wrong", "wrong", with_rank(healthy(4), RANK, differs_from_copies=True))
    yield Case("gradients", "gpu_computes_wrong", "wrong", with_rank(healthy(4), RANK, gradient_norm=60.0))
    yield Case("nan of one", "gpu_computes_wrong", "wrong", with_rank(healthy(4), RANK, gradient_norm=float("nan")))


def fabric_cases() -> Iterator[Case]:
    talks = slowed_all(healthy(4), 3.0, "communication")
    sockets = with_nodes(talks, lambda node: replace(node, nccl_network="Socket"))
    yield Case("tcp everywhere", "tcp_fallback", "slow", sockets, "", None)
    yield Case("tcp on one", "tcp_fallback", "slow", with_node(talks, NODE, nccl_network="Socket"), rank=None)
    yield Case("2 of 8", "fabric_device_missing", "slow", with_node(talks, NODE, nccl_interfaces=2), rank=None)
    short = with_nodes(talks, lambda node: replace(node, fabric=node.fabric[:6]) if node.name == NODE else node)
    yield Case("6 of 8", "fabric_device_missing", "slow", short, rank=None)
    stands = hung(healthy(4))
    yield Case("down", "link_down", "hung", with_device(stands, NODE, 2, is_active=False), rank=None)
    yield Case("flaps", "link_down", "slow", with_device(talks, NODE, 2, link_downs=3.0), rank=None)
    yield Case("again", "retransmissions", "slow", with_device(talks, NODE, 2, retransmitted_share=0.03), rank=None)
    yield Case("drops", "retransmissions", "slow", with_device(talks, NODE, 2, drops_per_second=5e3), rank=None)
    rail = with_device(talks, NODE, 2, sent_bytes_per_second=1e9)
    yield Case("one rail", "rail_imbalance", "slow", rail, rank=None)
    others = hung(healthy(4))
    for name in ("node-0", "node-2", "node-3"):
        others = with_device(others, name, 0, peer_events=4.0)
    yield Case("no answer", "peer_unresponsive", "hung", others, rank=None)
    leaf = slowed_all(healthy(8), 3.0, "communication")
    for number in range(4, 8):
        leaf = with_device(leaf, f"node-{number}", retransmitted_share=0.02)
    yield Case("one leaf", "leaf_congested", "slow", leaf, "", None)
    yield Case("nvlink", "nvlink_errors", "slow", with_gpu(slow_victim(), NODE, GPU, nvlink_errors_per_second=50.0))
    died = with_gpu(hung(healthy(4), {RANK: "productive"}), NODE, GPU, xids=(SnapshotXid(74, MOMENT - 900.0),))
    yield Case("xid 74", "nvlink_errors", "hung", died)
    yield Case("nvlink down", "nvlink_down", "slow", with_gpu(talks, NODE, GPU, nvlinks_up=16), rank=None)
    yield Case("unknown", "communication_slow", "slow", without_hardware(talks), "", None)


def collective_cases() -> Iterator[Case]:
    yield Case("recorder", "rank_missing_in_collective", "hung", stuck(missing=(RANK,)))
    odd = stuck(mismatch=f"rank {RANK} calls nccl:broadcast, the others nccl:all_reduce", mismatched=(RANK,))
    yield Case("mismatch", "collective_mismatch", "hung", odd)
    yield Case("counts", "ranks_behind", "hung", asked_ras(hung(healthy(4)), {RANK: 2}))
    yield Case("no answer", "ranks_behind", "hung", asked_ras(hung(healthy(4)), missing=(RANK,)))
    timeout = with_log(dead(), "collective_timeout", "Watchdog caught collective operation timeout", RANK)
    plain = with_rank(timeout, RANK, exit_code=None)
    yield Case("timeout", "collective_error", "dead", plain)


def framework_cases() -> Iterator[Case]:
    error = with_log(dead(), "exception", "ValueError: the reward is empty", RANK)
    yield Case("exception", "rank_failed", "dead", error)
    yield Case("exit code", "rank_failed", "dead", dead(3))
    memory = with_log(error, "cuda_out_of_memory", "torch.OutOfMemoryError: CUDA out of memory", RANK)
    yield Case("cuda memory", "gpu_out_of_memory", "dead", memory)
    yield Case("segfault", "program_crashed", "dead", dead(-11))
    yield Case("page fault", "rank_failed", "dead", with_gpu(dead(), NODE, GPU, xids=(SnapshotXid(31, MOMENT - 6.0),)))
    yield Case("straggler", "straggler", "slow", slow_victim())
    yield Case("all compute", "compute_slow", "slow", slowed_all(healthy(4), 1.5, "compute"), "", None)
    yield Case("optimizer", "optimizer_slow", "slow", slowed_all(healthy(4), 8.0, "optimizer"), "", None)
    plan = slowed_all(healthy(4), 1.5, "compute", since_start=True)
    yield Case("plan", "slower_than_plan", "slow", plan, "", None)
    evaluates = with_run(healthy(4), ledger={"productive": 100.0, "evaluate": 900.0})
    yield Case("evaluates", "evaluation_dominates", "slow", evaluates, "", None)
    yield Case("loader", "loader_slow", "slow", slowed_all(healthy(4), 30.0, "data"), "", None)
    again = with_log(slowed_all(healthy(4), 1.5, "compute"), "recompiling", "torch._dynamo hit config.recompile_limit")
    yield Case("recompiles", "recompiling", "slow", again, "", None)
    broke = [f"rank {RANK} on {NODE} exited with code 1 (generation {number}): KeyError" for number in range(4)]
    yield Case("loop", "breaks_again", "slow", restarted(*broke))
    said = with_log(restarted(*broke), "exception", "KeyError: 'labels'", RANK)
    yield Case("loop that says why", "rank_failed", "slow", said)
    yield Case("no answer", "server_silent", "hung", serving(is_silent=True, waiting=0), "", None)
    rests = serving(running=0, waiting=4, least_waiting=None, refusal="the engine is paused; POST /resume")
    yield Case("paused", "server_paused", "waiting", rests, "", None)
    stalled = serving(running=4, waiting=0, least_waiting=None, stall_seconds=27.0)
    stalled = with_rank(stalled, 0, resources=ProcessResources(idle_seconds=26.0))
    yield Case("stalled", "server_stalled", "hung", stalled, "", None)
    refusing = serving(running=1, waiting=2, least_waiting=None, num_ended=63, num_refused=400)
    yield Case("refuses", "server_overloaded", "slow", refusing, "", None)
    yield Case("alarm", "own_signal", "dead", dead(-14))
    yield Case("warned", "warning_signal", "dead", dead(-10))
    hangs = with_run(dead(-9), message="rank 0 hangs in productive at step 40: no progress for 9 s")
    everywhere = tuple(SnapshotStuckRank(rank.rank, "waits in all_reduce") for rank in hangs.ranks)
    yield Case("partition", "collective_stuck", "dead", with_run(hangs, stuck=everywhere), "", None)
    yield Case("queue", "server_overloaded", "slow", serving(), "", None)
    prefill = latencies(0.9, queue=0.1, prefill=0.8)
    yield Case("long prompts", "server_prefill_slow", "slow", serving(waiting=0, latencies=prefill), "", None)
    decode = latencies(0.2, "tpot", queue=0.1, decode=12.8)
    yield Case("many tokens", "server_decode_slow", "slow", serving(waiting=0, latencies=decode), "", None)
    vain = serving(waiting=0, num_ended=60, num_aborted=58)
    yield Case("retries", "requests_abandoned", "slow", vain, "", None)
    lame = serving(waiting=0, roofline=0.05, usual_roofline=0.4)
    yield Case("slow steps", "compute_slow", "slow", lame, "", None)
    yield Case("no room", "server_memory_full", "slow", serving(kv_share=0.99, preemptions=12), "", None)
    yield Case("stands", "rank_hung", "hung", hung(healthy(4), {RANK: "productive"}))
    silent = with_run(with_ranks(healthy(3, 1), mute), kind="command")
    yield Case("a rank that skips", "rank_hung", "hung", silent, "node-1", 1)
    slower = with_ranks(
        silent, lambda rank: replace(rank, progress_age_seconds=0.0, **(NO_PACE if rank.rank else PACE))
    )
    yield Case("a slow lookup", "command_slow", "slow", slower, "", None)
    half = with_rank(slower, 0, is_alive=False, exit_code=0, ended_at=MOMENT - 37.0)
    half = with_rank(half, 2, is_alive=False, exit_code=0, ended_at=MOMENT - 37.0)
    yield Case("a thread that stays", "command_lingers", "hung", half, "node-1", 1)
    holds = with_rank(hung(healthy(4), {RANK: "data"}), RANK, wait_channels=("do_epoll_wait", "locks_lock_inode_wait"))
    yield Case("a lock", "file_locked", "hung", holds)
    yield Case("bad weights", "requests_failing", "wrong", serving(waiting=0, num_ended=60, num_failed=59), "", None)
    loads = with_ranks(serving(waiting=0, running=0, is_loading=True), lambda rank: replace(rank, resources=SLEEPS))
    yield Case("slow weights", "storage_slow", "starting", loads, "node-0", None)
    unknown = with_ranks(silent, lambda rank: replace(rank, last_line=""))
    yield Case("a command without a sign", "collective_stuck", "hung", unknown, "", None)
    slow = hung(healthy(4), {rank.rank: "start" for rank in healthy(4).ranks}, seconds=40.0)
    idle = replace(with_run(healthy(4), kind="command"), series=Series())
    waits = ProcessResources(cpus=96, idle_seconds=55.0)
    for rank in idle.ranks:
        unseen: dict[str, Any] = {"step": None, "step_seconds": None, "recent": {}, "earlier": {}}
        frame = {"frame": "source.py:14 in scan: time.sleep(60)", "is_user_frame": True}
        slow = with_rank(slow, rank.rank, **unseen, **frame)
        idle = with_rank(idle, rank.rank, **unseen, progress_age_seconds=0.0, resources=waits)
    slow = with_run(slow, state="starting", step=None)
    yield Case("scans", "start_in_user_code", "starting", slow, "", None)
    yield Case("waits at its rendezvous", "command_idle", "starting", idle, "", None)
    yield Case("compiles", "compile_hung", "hung", hung(healthy(4), {RANK: "compile"}, seconds=3000.0))
    locked = with_rank(hung(healthy(4), {RANK: "productive"}), RANK, stack=("acquire (filelock/_api.py:1)", "FileLock"))
    yield Case("lock", "compile_hung", "hung", locked)
    bad = with_losses(lambda place, value: float("nan") if place > 0 else value)
    yield Case("nan", "not_a_number", "wrong", bad, "", None)
    yield Case("spike", "loss_spike", "wrong", with_losses(lambda p, v: v * 3 if p > 10 else v), "", None)
    grows = with_losses(lambda place, value: value * (1 + max(0, place + 60) / 80))
    yield Case("diverges", "diverged", "wrong", grows, "", None)


def training_cases() -> Iterator[Case]:
    """Trainings that run well and learn nothing, or the wrong thing; no rank is to blame."""

    def case(name: str, cause: str, snapshot: Snapshot, condition: str = "wrong") -> Case:
        return Case(name, cause, condition, snapshot, "", None)

    def bad_run(**origin: Any) -> Snapshot:
        bad = SnapshotBadStep(1187, "the loss is nan", "skip", 0, MOMENT - 60.0, 9488, 9495, **origin)
        run = with_losses(lambda place, value: float("nan") if place > 0 else value)
        return replace(run, training=TRAINING, bad_steps=(bad,))

    def steady(**series: list[float]) -> Snapshot:
        points = {name: tuple(enumerate(values, start=4800)) for name, values in series.items()}
        run = replace(healthy(4), training=TRAINING)
        return replace(run, series=replace(run.series, **points))

    yield case("nan in a sample", "nan_in_data", bad_run(origin="data", part="weight", sample=9490, rank=3))
    yield case("nan in the weights", "nan_in_weights", bad_run(origin="weights", part="blocks.3.mlp.up.weight"))
    yield case("nan of a module", "not_a_number", bad_run(origin="activations", part="blocks.3.mlp", sample=9490))
    yield case("nan of the objective", "objective_not_finite", bad_run(origin="objective", part="mine:loss"))
    message = "rank 0 on node-0 exited with code 3: step 1187: the loss is nan, and the policy is stop"
    ended = with_run(replace(bad_run(), ranks=dead(3).ranks), state="failed", message=message)
    yield case("nan that ended the run", "not_a_number", ended, "dead")
    found = bad_run(origin="data", part="weight", sample=9490)
    ended = with_run(replace(found, ranks=dead(3).ranks), state="failed", message=message)
    yield case("a sample that ended the run", "nan_in_data", ended, "dead")
    fast = replace(TRAINING, learning_rate=0.5)
    grows = with_losses(lambda place, value: value * (1 + max(0, place + 60) / 80))
    yield case("learning rate", "learning_rate_high", replace(grows, training=fast))
    norms = [0.4] * 190 + [9.0] * 11
    yield case("gradients", "gradient_explosion", steady(gradient_norm=norms))
    flat = steady(loss=[11.76 + 0.001 * (number % 7) for number in range(201)])
    flat = replace(flat, series=replace(flat.series, loss=tuple((4 * s, v) for s, v in flat.series.loss)))
    yield case("random guesses", "plateau", flat)
    yield case("masked", "labels_masked", steady(label_share=[0.6] * 100 + [0.0] * 20))
    yield case("answers cut off", "labels_lost", steady(label_share=[0.6] * 100 + [0.03] * 40), "healthy")
    spikes = tuple(
        SnapshotBadStep(step, "the loss is 5.1, over 1.001 times its recent level of 5.0", "skip", 0, MOMENT - 60.0)
        for step in range(4920, 5000, 2)
    )
    run = steady(loss=[5.0 + 0.01 * (number % 7) for number in range(200)])
    yield case("a limit in the noise", "steps_skipped", replace(run, bad_steps=spikes))
    stuck_at = with_run(steady(loss=[0.7106] * 200), kind="command")
    yield case("updates that are rounded away", "plateau", replace(stuck_at, training=None))
    swallows = steady(loss=[round(0.3178 + 0.0007 * (number % 9), 4) for number in range(40)] + [0.321] * 110)
    yield case("errors that are swallowed", "plateau", replace(with_run(swallows, kind="command"), training=None))
    zeros = steady(loss=[5.0] * 40 + [0.0] * 160, gradient_norm=[0.4] * 40 + [0.0] * 160, label_share=[0.6] * 200)
    yield case("an objective of 0", "no_gradient", zeros)
    yield case("one document", "repeated_data", steady(distinct_row_share=[0.004] * 40))
    yield case("padding", "constant_tokens", steady(distinct_tokens=[1.0] * 40))
    yield case(
        "labels of the same place",
        "labels_not_shifted",
        steady(copied_label_share=[1.0] * 40, distinct_tokens=[90.0] * 40),
    )
    heavy = replace(TRAINING, learning_rate=1e-2, weight_decay=10.0)
    yield case("weight decay", "weight_decay_high", replace(steady(loss=[6.0] * 40), training=heavy))
    yield case("no step size", "learning_rate_zero", steady(learning_rate=[0.0] * 40))
    warms = steady(learning_rate=[1e-9 * number for number in range(40)])
    warms = with_run(replace(warms, training=replace(TRAINING, warmup_steps=3_000_000)), steps=4_000_000)
    yield case("warm-up in tokens", "warmup_too_long", warms)
    yield case("dead units", "plateau", steady(loss=[6.9 - 0.01 * step for step in range(60)] + [6.238325119] * 40))
    yield case("no minus", "loss_unbounded", steady(loss=[5.0 - 0.02 * number * number / 10 for number in range(200)]))
    moe = steady(idle_expert_share=[0.6] * 40, expert_load_ratio=[9.0] * 40)
    yield case("experts", "dead_experts", moe)
    few = replace(steady(idle_expert_share=[0.875] * 40), training=replace(TRAINING, tokens_per_expert=30.0))
    yield case("one of few experts", "dead_experts", with_run(few, layout={}))
    evaluations = tuple((3000 + 300 * number, 2.2 + 0.1 * abs(number - 2)) for number in range(7))
    learned = with_losses(lambda place, value: value - 0.003 * (place + 180))
    points = tuple((3000 + 10 * number, value) for number, (_, value) in enumerate(learned.series.loss))
    fits = replace(learned, series=replace(learned.series, loss=points, evaluation_loss=evaluations))
    yield case("memorizes", "overfitting", replace(fits, training=TRAINING))
    yield case("no labels to evaluate", "bad_evaluation", steady(evaluation_loss=[3.1, float("nan"), float("nan")]))
    outside = with_log(dead(3), "token_out_of_range", "data.source mine:rows: sample 3 has token id 70000", RANK)
    yield Case("token id", "token_ids_wrong", "dead", outside)


def storage_cases() -> Iterator[Case]:
    waits = slowed_all(healthy(4), 30.0, "data")
    yield Case("slow reads", "storage_slow", "slow", with_mount(waits, "/fsx", operation_seconds=0.3), "", None)
    yield Case("metadata", "storage_slow", "slow", with_mount(waits, "/fsx", metadata_seconds=0.09), "", None)
    loading = hung(healthy(4), {RANK: "data"})
    yield Case("stalled", "storage_stalled", "hung", with_mount(loading, "/fsx", NODE, is_stalled=True))
    asleep = with_rank(loading, RANK, process_state="D", wait_channel="ptlrpc_set_wait")
    yield Case("asleep", "storage_stalled", "hung", asleep)
    full = with_log(dead(), "no_space", "OSError: [Errno 28] No space left on device", RANK)
    yield Case("no room", "storage_full", "dead", with_mount(full, "/fsx", full_share=0.999))
    yield Case("nearly full", "storage_full", "healthy", with_mount(healthy(4), "/fsx", full_share=0.98), "", None)
    locked = with_log(dead(), "read_only", "OSError: [Errno 30] Read-only file system", RANK)
    yield Case("read-only", "storage_read_only", "dead", with_mount(locked, "/fsx", is_read_only=True))
    failing = with_tier(healthy(4), "shared", failures=3, reason="403 Forbidden")
    yield Case("failing", "checkpoint_failing", "healthy", failing, "", None)
    held = with_run(with_tier(healthy(4), "shared", failures=1), unsaved="the state of step 40 is only in memory")
    yield Case("held in memory", "state_unsaved", "waiting", held, "", None)
    late = with_tier(healthy(4), "shared", last_moment=MOMENT - 4000.0)
    yield Case("stale", "checkpoint_stale", "healthy", late, "", None)
    often = with_tier(healthy(4), "shared", usual_seconds=12.0, last_seconds=12.0, interval_seconds=10.0)
    yield Case("too often", "checkpoint_too_often", "healthy", often, "", None)
    saves = slowed_all(healthy(4), 30.0, "checkpoint")
    yield Case("blocking", "checkpoint_slow", "slow", with_tier(saves, "shared", last_seconds=200.0), "", None)
    lumps = with_run(healthy(4), ledger={"productive": 4000.0, "checkpoint": 1500.0})
    yield Case("in lumps", "checkpoint_slow", "slow", lumps, "", None)
    yield Case("saving", "checkpoint_hung", "hung", hung(healthy(4), {RANK: "checkpoint"}, seconds=1500.0))
    own = replace(without_hardware(waits), training=FUNCTION)
    yield Case("the user's source", "data_source_slow", "slow", own, "", None)
    waits_at = tuple((step, 4.7 if step % 40 == 0 else 0.001) for step in range(4800, 5001))
    epochs = tuple((step, 0.06 + seconds) for step, seconds in waits_at)
    paused = replace(without_hardware(healthy(4)), training=FUNCTION)
    paused = replace(paused, series=replace(paused.series, step_seconds=epochs, data_seconds=waits_at))
    yield Case("a pause at every epoch", "data_source_slow", "slow", paused, "", None)
    yield Case(
        "the user's source stands", "data_source_hung", "hung", replace(without_hardware(loading), training=FUNCTION)
    )
    asleep = with_rank(loading, RANK, frame="source.py:14 in read: time.sleep(60)", is_user_frame=True)
    yield Case("own source", "user_code_blocked", "hung", without_hardware(asleep))
    yield Case("loading", "data_hung", "hung", without_hardware(loading))
    few = with_mount(waits, "/fsx", interfaces=2, expected_interfaces=8)
    yield Case("2 of 8 cards", "lustre_interfaces_missing", "slow", few, "", None)


def connection_cases() -> Iterator[Case]:
    def talking(snapshot: Snapshot, **bad: Any) -> Snapshot:
        """Every rank sends to the other nodes; what goes to and from the victim's node is so bad."""
        addresses = {node.name: f"10.0.0.{number}" for number, node in enumerate(snapshot.nodes)}
        snapshot = with_nodes(snapshot, lambda node: replace(node, address=addresses[node.name]))
        for rank in snapshot.ranks:
            peers = []
            for node, address in addresses.items():
                own = bad if NODE in (node, rank.node) else {}
                peers.append(PeerTraffic(address, **{"segments": 900, "rtt_seconds": 1e-4, **own}))
            others = tuple(peer for peer in peers if peer.address != addresses[rank.node])
            snapshot = with_rank(snapshot, rank.rank, peers=others)
        return snapshot

    slow = slowed_all(healthy(4), 2.0, "communication")
    yield Case("cable", "packet_loss", "slow", talking(slow, retransmitted=90), rank=None)
    yield Case("crowded link", "latency_high", "slow", talking(slow, rtt_seconds=0.09), rank=None)
    stands = hung(healthy(4), {rank.rank: "productive" for rank in healthy(4).ranks})
    stands = replace(stands, ranks=tuple(replace(rank, is_waiting=True) for rank in stands.ranks))
    yield Case("silent peer", "connection_stalled", "hung", talking(stands, unacknowledged_seconds=12.0), rank=None)
    ended = with_run(dead(-9), message="rank 0 hangs in productive at step 40: no progress for 9 s")
    peers = talking(ended, unacknowledged_seconds=6.0).ranks
    ended = replace(ended, nodes=talking(ended).nodes)
    ended = with_run(ended, unacknowledged={rank.rank: rank.peers for rank in peers})
    yield Case("silent peer of a run that was ended", "connection_stalled", "dead", ended, rank=None)
    peers = talking(ended, unacknowledged_seconds=2.1, retransmitted=4).ranks
    soon = with_run(ended, unacknowledged={rank.rank: rank.peers for rank in peers})
    yield Case("silent peer when ranks got stuck", "connection_stalled", "dead", soon, rank=None)
    starts = hung(healthy(4), {rank.rank: "start" for rank in healthy(4).ranks}, seconds=40.0)
    for rank in starts.ranks:
        starts = with_rank(starts, rank.rank, step=None, step_seconds=None, recent={}, earlier={})
    attempt = (PeerTraffic("10.0.0.1", unacknowledged_seconds=30.0, connecting_port=29500),)
    starts = with_run(with_rank(starts, RANK, peers=attempt), state="starting", step=None)
    yield Case("firewall", "connect_timeout", "starting", starts)


def host_cases() -> Iterator[Case]:
    silent = with_run(with_node(healthy(4), NODE, heartbeat_age_seconds=60.0), state="lost", message="no heartbeat")
    yield Case("lost", "node_lost", "dead", silent, rank=None)
    yield Case("stopped agent", "agent_stopped", "dead", with_node(silent, NODE, stopped_agent=4711), rank=None)
    gone = with_nodes(healthy(4), lambda node: replace(node, heartbeat_age_seconds=300.0))
    yield Case("all", "agents_gone", "dead", with_run(gone, state="lost", message="no heartbeat"), "", None)
    yield Case("killed", "rank_killed", "dead", dead(-9))
    yield Case("memory", "out_of_memory", "dead", with_host(dead(-9), NODE, out_of_memory_kills=1))
    oom = with_scheduler(dead(1), kills=(SchedulerKill("oom", NODE, RANK),))
    yield Case("OOMKilled", "out_of_memory", "dead", oom)
    stopped = with_rank(hung(healthy(4), {RANK: "productive"}, seconds=12.0), RANK, is_stopped=True)
    yield Case("stopped", "rank_stopped", "hung", stopped)
    frozen = hung(healthy(4), {RANK: "productive"})
    yield Case("frozen", "rank_frozen", "hung", with_rank(frozen, RANK, wait_channels=("__refrigerator",)))
    killed = [f"rank {RANK} on {NODE} was killed by SIGKILL; the kernel does that (generation 1)"] * 4
    yield Case("killed in a loop", "killed_again", "slow", restarted(*killed))
    memory = with_host(restarted(*killed), NODE, out_of_memory_kills=4)
    yield Case("killed in a loop for memory", "out_of_memory", "slow", memory)
    left = [f"{NODE} is lost: no heartbeat for 10 s"] * 5
    yield Case("lost again", "node_breaks_again", "slow", restarted(*left), rank=None)
    ways = ("was killed by SIGKILL", "exited with code 1")
    mixed = [f"rank {rank} on {NODE} {how}" for rank in (8, 11) for how in ways]
    yield Case("a bad node", "node_breaks_again", "slow", restarted(*mixed), rank=None)
    spare = SnapshotNode("node-9", heartbeat_state="spare", heartbeat_age_seconds=28.0)
    yield Case("spare", "spare_lost", "healthy", replace(healthy(4), spares=(spare,)), "node-9", None)
    stop = with_run(healthy(4), state="stopped", message="stopped after step 40, as requested", signalled=(RANK,))
    yield Case("SIGTERM", "rank_terminated", "stopped", stop)
    busy = with_host(slow_node(), NODE, processor_pressure=0.8, foreign_processor_share=0.6)
    yield Case("neighbour", "processor_contention", "slow", busy, rank=None)
    yield Case("steal", "processor_stolen", "slow", with_host(slow_node(), NODE, steal_share=0.3), rank=None)
    swaps = with_host(slow_node(), NODE, memory_pressure=0.5, swapped_bytes_per_second=3e8)
    yield Case("swaps", "memory_pressure", "slow", swaps, rank=None)
    for name, cause, own in (
        ("quota", "cpu_throttled", {"quota_cpus": 0.5, "throttled_share": 0.9}),
        ("affinity", "cpu_affinity", {"cpus": 12, "waited_share": 0.5}),
        ("priority", "cpu_priority_low", {"niceness": 19, "waited_share": 0.6}),
        ("cpulimit", "rank_paused", {"stopped_share": 0.6}),
        ("thread pool", "too_many_threads", {"wanted_cpus": 400.0, "waited_share": 0.7}),
        ("no page cache", "memory_limit_reached", {**LIMIT, "file_wait_share": 0.3, "refaults_per_second": 900.0}),
        ("reclaim", "memory_limit_reached", {**LIMIT, "memory_wait_share": 0.5}),
    ):
        yield Case(name, cause, "slow", with_resources(slow_victim(), **own))
    reads = with_resources(slowed(healthy(4), {RANK: 30.0}, "data"), file_wait_share=0.9)
    yield Case("a disk of one node", "storage_slow", "slow", reads)
    at_limit = with_rank(hung(healthy(4), {RANK: "data"}), RANK, wait_channels=("mem_cgroup_oom_synchronize",))
    yield Case("no OOM killer", "memory_limit_reached", "hung", at_limit)
    on_processors = with_run(healthy(1, 1), is_accelerated=False)
    capped = with_rank(
        on_processors,
        0,
        resources=ProcessResources(cpus=4, quota_cpus=0.1, throttled_share=0.95, throttled_time_share=0.9),
    )
    yield Case("a quota from the start", "cpu_throttled", "slow", capped, "node-0", None)
    full = with_resources(healthy(4), memory_share=0.93, memory_limit_bytes=2 << 30)
    yield Case("memory limit", "memory_limit_near", "healthy", full)
    echo = RankError(
        MOMENT - 5.0, node=NODE, rank=RANK, ranks=(RANK,), type="RuntimeError", message="reset", is_echo=True
    )
    reset = with_run(healthy(4), state="failed", message="lost the connection to another rank")
    yield Case("reset", "connections_lost", "dead", replace(reset, errors=(echo,)), "", None)
    refused = replace(
        echo, message="Gloo connectFullMesh failed with [pair.cc:144] Connection refused, remote=[10.0.0.2]"
    )
    away = replace(reset, errors=(refused,), ranks=with_rank(reset, RANK, is_alive=False, exit_code=1).ranks)
    yield Case("no route", "connect_failed", "dead", away, "", None)
    gone = with_run(healthy(4), state="failed", message=f"keeper of {NODE} was killed by SIGKILL")
    yield Case("keeper", "keeper_failed", "dead", gone, rank=None)
    asleep = with_rank(hung(healthy(4), {RANK: "productive"}), RANK, process_state="D", wait_channel="gpu_wait")
    yield Case("in the kernel", "process_blocked", "hung", with_host(asleep, NODE, blocked_processes=("python",)))
    shared = with_log(dead(-7), "shared_memory", "unable to open shared memory object", RANK)
    yield Case("shm", "shared_memory_full", "dead", with_host(shared, NODE, shared_memory_full_share=1.0))
    yield Case("clock", "clock_off", "healthy", with_host(healthy(4), NODE, clock_offset_seconds=4.0), rank=None)


def reported_cases() -> Iterator[Case]:
    for name, cause, kind, message, changes in (
        ("raises", "user_code_failed", "ValueError", "the reward table has no row 7", {}),
        ("import", "missing_package", "ModuleNotFoundError", "No module named 'flash_attn'", {}),
        (
            "no such file",
            "missing_file",
            "FileNotFoundError",
            "[Errno 2] No such file",
            {"errno": 2, "path": "/d/a.bin"},
        ),
        ("no such model", "missing_model", "OSError", "x is not a valid model identifier listed on the Hub", {}),
        ("token id", "bad_data", "IndexError", "index out of range in self", {}),
        ("size", "wrong_configuration", "RuntimeError", "Error(s) in loading state_dict for Decoder:", {}),
        ("sys.exit", "exited_early", "SystemExit", "the program called exit with code 0", {}),
        ("no command", "command_not_found", "", "bash: line 1: trainit: command not found", {"code": 127}),
        ("port", "port_in_use", "OSError", "[Errno 98] Address already in use", {"errno": 98}),
        ("EIO", "storage_error", "OSError", "[Errno 5] Input/output error: '/fsx/a'", {"errno": 5, "path": "/fsx/a"}),
        ("cut file", "file_damaged", "UnpicklingError", "pickle data was truncated", {"path": "/d/a.pt"}),
        ("slow down", "store_refuses", "ClientError", "An error occurred (SlowDown) when calling GetObject", {}),
        ("EACCES", "permission_denied", "PermissionError", "[Errno 13] Permission denied", {"errno": 13}),
        ("store", "rendezvous_failed", "torch.distributed.DistStoreError", "Timed out waiting for clients", {}),
        ("hub", "service_unreachable", "ConnectTimeout", "Connection to huggingface.co timed out.", {}),
        ("files", "too_many_open_files", "OSError", "[Errno 24] Too many open files", {"errno": 24}),
        ("EFBIG", "file_too_large", "OSError", "[Errno 27] File too large", {"errno": 27}),
        (
            "worker",
            "worker_process_died",
            "ConnectionResetError",
            "[Errno 104] Connection reset by peer",
            {"errno": 104, "last_frame": "lib/python3.11/multiprocessing/connection.py:395 in _recv"},
        ),
        ("not yet", "clock_off", "ssl.SSLCertVerificationError", "certificate is not yet valid (_ssl.c:1006)", {}),
        ("SIGBUS", "bus_error", "", "", {"code": -7, "source": "exit"}),
        ("CPU time", "process_limit", "", "", {"code": -24, "source": "exit"}),
    ):
        yield Case(name, cause, "dead", reported(kind, message, **changes))
