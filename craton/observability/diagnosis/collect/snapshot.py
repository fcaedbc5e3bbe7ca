"""`take_snapshot`: collect all evidence about a run that is available from this machine.

Most comes from the run directory. The scheduler is queried once. A node that is this machine is observed directly: its
processes, GPUs, network, file systems and load. Prometheus, if configured, covers the other nodes. NCCL RAS and
PyTorch's flight recorders are read if present. What cannot be observed becomes a note and never fails the snapshot.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from craton.agent import newest_generation
from craton.agent.coordination import read_avoided
from craton.errors import CratonError
from craton.formatting import counted, whole_duration
from craton.observability.diagnosis.collect.clocks import beat_age, clock_offset, moment_for, with_remote_clocks
from craton.observability.diagnosis.collect.collectives import read_collectives
from craton.observability.diagnosis.collect.errors import read_errors, was_sent
from craton.observability.diagnosis.collect.file_systems import paths_of
from craton.observability.diagnosis.collect.latencies import latencies_of
from craton.observability.diagnosis.collect.members import read_snapshot_members
from craton.observability.diagnosis.collect.metrics import Steps, collective_seconds, read_steps, series_of
from craton.observability.diagnosis.collect.node import look_at_machine
from craton.observability.diagnosis.collect.processes import look_at_process, stack_of, taken_stack, visible_cards
from craton.observability.diagnosis.collect.prometheus import ask_prometheus
from craton.observability.diagnosis.collect.records import (
    last_lines,
    notable,
    printed_times,
    read_events,
    read_logs,
    read_restarts,
    read_serving,
    signalled_ranks,
    stuck_ranks,
    tiers_of,
    unacknowledged_peers,
)
from craton.observability.diagnosis.collect.scheduler import scheduler_of
from craton.observability.diagnosis.collect.training import read_bad_steps, training_facts
from craton.observability.diagnosis.root_cause import diagnose
from craton.observability.diagnosis.snapshot import (
    RunFacts,
    Serving,
    Snapshot,
    SnapshotError,
    SnapshotFabricDevice,
    SnapshotNode,
    SnapshotRank,
    with_visible_cards,
)
from craton.observability.diagnosis.symptoms import symptoms_of
from craton.orchestration import (
    ServerWatch,
    Stages,
    living_agents,
    read_submission,
    server_of,
    stopped_by_scheduler,
    stopped_by_user,
)
from craton.orchestration.changes import hosts_of
from craton.orchestration.preflight import read_nccl_log
from craton.orchestration.start import find_rescue
from craton.orchestration.watching import settled, standing_of
from craton.telemetry import (
    RunDirectory,
    RunNotFoundError,
    RunSummary,
    find_run,
    list_runs,
    plan_checkpoint_intervals,
    plan_twins,
    read_json,
    runs_root,
    summarize,
)
from craton.telemetry.files import noting_unread, open_regular
from craton.telemetry.node import Heartbeat, NodeStatus, read_heartbeat, read_status
from craton.telemetry.progress import age_of

LOG_SECONDS = 3600.0  # older log lines do not explain the current state
MAX_STACKS = 4
LOADS_SECONDS = 1800.0  # of one stage of the start of a server
ADMIN_SECONDS = 5.0  # of an admin request, while running requests wait for it, to be worth mentioning
LISTENS_SECONDS = 15.0  # after its engine is ready, for the front end of a server to listen
NCCL_CHARACTERS = 512 << 10  # from the beginning of a log, where NCCL reports its network
LAYOUT = ("pp", "replicate", "fsdp", "cp", "tp", "ep")


def take_snapshot(
    run: RunDirectory, prometheus: str | None = None, now: float | None = None, look_here: bool = True
) -> Snapshot:
    """Take a snapshot. `prometheus`: URL [default: $CRATON_PROMETHEUS]; without `look_here` this machine is not
    observed."""
    with noting_unread() as unread:
        snapshot = _taken(run, prometheus, now, look_here)
    if not unread:
        return snapshot
    path, error = next(iter(unread.items()))
    note = (
        f"{counted(len(unread), 'file')} of the run could not be read: {path.relative_to(run.path)}: {error.strerror}"
    )
    return replace(snapshot, notes=(note, *snapshot.notes))


def _taken(run: RunDirectory, prometheus: str | None, now: float | None, look_here: bool) -> Snapshot:
    launch, plan = read_json(run.launch_path), read_json(run.plan_path)
    moment = moment_for(run, launch.get("nodes") or (), time.time()) if now is None else now
    notes: list[str] = []
    standing = standing_of(run)
    known = {str(node): read_heartbeat(run, str(node)) for node in launch.get("nodes") or ()}
    has_clock = now is None and bool(known) and all(beat and beat.is_of_this_boot for beat in known.values())
    summary = settled(summarize(run, None if has_clock else moment), standing)
    events = read_events(run)
    started = int(launch.get("generation") or 0)
    facts = _facts(run, summary, launch, plan, events, moment)
    beats = {node: known[node] if node in known else read_heartbeat(run, node) for node in facts.nodes}
    statuses = {node: read_status(run, node) for node in facts.nodes}
    steps = read_steps(run, facts.nodes, facts.generation)
    now_takes, took = collective_seconds(steps)
    facts = replace(facts, collective_seconds=now_takes, collective_seconds_before=took)
    ranks = _ranks(steps, facts, statuses, events, moment)
    here = [node for node, beat in beats.items() if beat is not None and beat.host == socket.gethostname()]
    alive = {agent.node for agent in living_agents(run)} if here else set()
    is_moving = summary.state in ("starting", "running", "stopping")
    hosts = _hosts(run, facts, beats)
    nodes = []
    machine = (
        look_at_machine(run, bool(launch.get("gpus")), facts.ranks_per_node)
        if here and look_here and is_moving
        else None
    )
    for name in facts.nodes:
        node = _node(name, beats[name], hosts.get(name, ""), facts, launch, plan, moment, now is None)
        beat = beats[name]
        if beat is not None and name in here:
            node = replace(node, stopped_agent=beat.pid if beat.is_stopped_here else None)
            node = replace(node, agent_is_alive=name in alive if node.heartbeat_state == "running" else None)
            if machine is not None:
                node = machine.onto(node)
        nodes.append(node)
    if is_moving:
        nodes = [_with_interface(node, statuses[node.name]) for node in nodes]
    if now is None and is_moving:
        nodes = with_remote_clocks(nodes, beats)
    spares = _spares(run, facts, known, launch, plan, moment, alive, now is None) if is_moving else ()
    if here and is_moving and look_here:
        ranks = tuple(look_at_process(rank) if rank.node in here else rank for rank in ranks)
    snapshot = Snapshot(
        moment=moment,
        run=facts,
        scheduler=scheduler_of(standing, facts.on, {name: hosts.get(name, name) for name in facts.nodes}),
        ranks=ranks,
        nodes=tuple(nodes),
        spares=spares,
        tiers=tiers_of(events, plan_checkpoint_intervals(plan)),
        series=series_of(run, facts.nodes),
        events=notable(events),
        errors=read_errors(events, started, summary.state == "failed"),
        training=training_facts(run),
        bad_steps=read_bad_steps(events, started),
    )
    address = prometheus or os.environ.get("CRATON_PROMETHEUS")
    if address:
        snapshot, note = ask_prometheus(snapshot, address)
        notes += [note] if note else []
    if facts.kind == "serve" and is_moving:
        serving, note = _serving(run, facts, moment, look_here, len(here) == len(facts.nodes))
        snapshot = replace(snapshot, serving=serving)
        notes += [note] if note else []
    is_local = bool(here) and look_here
    snapshot = with_visible_cards(snapshot, _visible(snapshot, launch, here if is_local and is_moving else []))
    if is_moving or (summary.state == "failed" and facts.stuck):
        asks_ras = is_moving and is_local and bool(launch.get("gpus"))
        began, per_node = facts.generation_began or 0.0, facts.ranks_per_node
        collectives, note = read_collectives(run, launch, asks_ras, began, is_local, per_node)
        if not is_moving:  # stacks show which rank the others waited for, but not that it called something else
            stuck = tuple(collective for collective in collectives.stuck if collective.mismatch)
            collectives = replace(collectives, stuck=stuck)
        snapshot = replace(snapshot, collectives=collectives)
        notes += [note] if note else []
    snapshot = _closer(run, replace(snapshot, notes=tuple(notes)), here if look_here else [])
    members = read_snapshot_members(
        run,
        symptoms_of(snapshot).condition,
        facts.message,
        lambda member: diagnose(take_snapshot(member, prometheus, now, look_here)),
    )
    return replace(snapshot, members=members)


def chosen_run(name: str | None) -> RunDirectory:
    """Return the run of this name [default: the newest]. RunNotFoundError if there is none."""
    if name is not None:
        return find_run(name)
    runs = list_runs()
    if not runs:
        raise RunNotFoundError(f"there are no runs in {runs_root()}; set CRATON_RUNS to use another folder")
    return runs[0]


def read_snapshot(path: Path) -> Snapshot:
    """Read a saved snapshot. SnapshotError if the file is missing or not a snapshot."""
    try:
        return Snapshot.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SnapshotError(f"{path} cannot be read: {error}") from error


def _spares(
    run: RunDirectory,
    facts: RunFacts,
    beats: Mapping[str, Heartbeat | None],
    launch: Mapping[str, Any],
    plan: Mapping[str, Any],
    moment: float,
    alive: Collection[str],
    is_live: bool,
) -> tuple[SnapshotNode, ...]:
    """Return the spare nodes, without those that the run avoids."""
    spares = []
    away = {*facts.nodes, *read_avoided(run)}
    for name, beat in beats.items():
        if name in away:
            continue
        node = _node(name, beat, beat.host if beat else "", facts, launch, plan, moment, is_live)
        if beat is None or node.heartbeat_state != "spare":
            continue
        is_here = beat.host == socket.gethostname() and bool(alive)
        spares.append(replace(node, agent_is_alive=name in alive if is_here else None))
    return tuple(spares)


def _serving(
    run: RunDirectory, facts: RunFacts, moment: float, asks: bool, is_here: bool
) -> tuple[Serving | None, str]:
    """Return the records of a server, completed by its metrics; a note if these cannot be read. Only a server on this
    machine can be called silent: from another one a firewall looks the same."""
    recorded = read_serving(run, facts.nodes, moment)
    if not asks:
        return recorded, ""
    try:
        watch = ServerWatch(server_of(run))
    except CratonError as error:
        return recorded, "" if recorded is None else str(error)
    if recorded is None:  # before its first request
        if not is_here or facts.state != "running":
            return None, ""
        refusal = watch.refusal()
        return Serving(is_loading=not refusal and not watch.is_ready(), refusal=refusal), ""
    answer = watch.look()
    if answer is None:
        note = "the server returns no metrics: KV cache usage and latencies are not known"
        if _loads(run, moment):
            return replace(recorded, is_loading=True), note
        is_silent = is_here and facts.state == "running" and not watch.responds()
        return replace(recorded, is_silent=is_silent), note
    asked = replace(
        recorded,
        running=answer.running,
        waiting=answer.waiting,
        first_token_seconds=answer.first_token_seconds,
        num_refused=answer.refused,
        stall_seconds=answer.stall_seconds,
    )
    refusal = watch.refusal()
    if not refusal and min(answer.admin_seconds, answer.stall_seconds) > ADMIN_SECONDS:
        refusal = (
            "an admin request, such as POST /update_weights, has been under way for "
            f"{whole_duration(answer.admin_seconds)}; if the sender of the weights is gone, end that request"
        )
    asked = replace(asked, kv_share=answer.kv_share, preemptions=answer.preemptions, refusal=refusal)
    return replace(asked, latencies=latencies_of(run, answer)), ""


def _loads(run: RunDirectory, moment: float) -> bool:
    """Return whether a server prepares its engine, or has done so a moment ago: its front end listens after that."""
    stages = Stages(run)
    stages.look()
    since = stages.newest.get("time")
    return isinstance(since, float) and moment - since < (LISTENS_SECONDS if stages.is_ready else LOADS_SECONDS)


def _closer(run: RunDirectory, snapshot: Snapshot, here: Sequence[str]) -> Snapshot:
    """Look closer at suspect ranks: read their logs first, and their stacks."""
    if snapshot.run.kind == "command" and snapshot.run.state == "running":
        ages = {rank: snapshot.moment - time for rank, time in printed_times(run, snapshot.run.world).items()}
        ranks = tuple(replace(rank, printed_seconds=ages.get(rank.rank)) for rank in snapshot.ranks)
        snapshot = replace(snapshot, ranks=ranks)
    symptoms = symptoms_of(snapshot)
    suspects = [rank for symptom in symptoms.all for rank in symptom.ranks]
    ended = [rank.rank for rank in snapshot.ranks if rank.exit_code not in (0, None)]
    order = list(dict.fromkeys([*suspects, *ended, *(rank.rank for rank in snapshot.ranks)]))
    since = max(snapshot.run.generation_began or 0.0, snapshot.moment - LOG_SECONDS)
    if symptoms.condition in ("dead", "done", "stopped"):
        since = snapshot.run.generation_began or 0.0
    snapshot = replace(snapshot, logs=read_logs(run, order, since, snapshot.run.nodes))
    if snapshot.run.kind == "command" and symptoms.condition in ("hung", "dead"):
        last = last_lines(run, snapshot.run.world)
        ranks = tuple(replace(rank, last_line=last.get(rank.rank, "")) for rank in snapshot.ranks)
        snapshot = replace(snapshot, ranks=ranks)
    if snapshot.run.is_accelerated and len(snapshot.run.nodes) > 1:
        snapshot = replace(snapshot, nodes=tuple(_with_network(run, node, snapshot) for node in snapshot.nodes))
    if symptoms.condition != "hung":
        return snapshot
    looked = [rank.rank for rank in snapshot.ranks if rank.node in here and (rank.rank in suspects or not suspects)]
    taken = {rank.rank: stack for rank in snapshot.ranks if rank.frame and (stack := taken_stack(run, rank.rank))}
    missing = [number for number in looked if number not in taken]
    stacks = {number: stack_of(rank) for number in missing[:MAX_STACKS] if (rank := snapshot.rank(number)) is not None}
    stacks |= taken
    return replace(
        snapshot,
        ranks=tuple(replace(rank, stack=stacks.get(rank.rank) or rank.stack) for rank in snapshot.ranks),
    )


def _hosts(run: RunDirectory, facts: RunFacts, beats: Mapping[str, Heartbeat | None]) -> dict[str, str]:
    """Return node of the run → its machine: the name in the scheduler, else its own host name."""
    try:
        called = hosts_of(run) if facts.on != "local" else {}
    except CratonError:
        called = {}
    own = {name: beat.host for name, beat in beats.items() if beat is not None and beat.host}
    return {**own, **called}


def _with_interface(node: SnapshotNode, status: NodeStatus | None) -> SnapshotNode:
    """Add the network interface that the node's agent found to be down."""
    if status is None or not status.interface_down:
        return node
    others = tuple(device for device in node.fabric if device.name != status.interface_down)
    return replace(node, fabric=(*others, SnapshotFabricDevice(status.interface_down, is_active=False)))


def _visible(snapshot: Snapshot, launch: Mapping[str, Any], here: Sequence[str]) -> dict[str, str]:
    """Return node → its GPUs, where the launch or the environment of a rank on this machine limits them."""
    cards_by_node = {str(node): str(cards) for node, cards in (launch.get("cards") or {}).items()}
    for rank in snapshot.ranks:
        if rank.node in here and rank.node not in cards_by_node and rank.pid is not None:
            cards_by_node[rank.node] = visible_cards(rank.pid)
    return {node: cards for node, cards in cards_by_node.items() if cards}


def _with_network(run: RunDirectory, node: SnapshotNode, snapshot: Snapshot) -> SnapshotNode:
    """Add the network that NCCL reports in the log of the node's first rank (with NCCL_DEBUG=INFO)."""
    first = next((rank.rank for rank in snapshot.ranks if rank.node == node.name), None)
    if first is None or node.nccl_network:
        return node
    try:
        with open_regular(run.log_path(first)) as log:
            nccl_log = read_nccl_log(log.read(NCCL_CHARACTERS).decode(errors="replace"))
    except OSError:
        return node
    if not nccl_log.is_told:
        return node
    return replace(node, nccl_network=nccl_log.networks[0], nccl_interfaces=nccl_log.num_nics or None)


def _facts(
    run: RunDirectory,
    summary: RunSummary,
    launch: Mapping[str, Any],
    plan: Mapping[str, Any],
    events: Sequence[Mapping[str, Any]],
    moment: float,
) -> RunFacts:
    started = int(launch.get("generation") or 0)
    newest = newest_generation(run)
    if newest is not None and newest.number < started:
        newest = None
    nodes = newest.nodes if newest else (launch.get("nodes") or [])[: launch.get("num_nodes") or None]
    layout = (newest.layout if newest else None) or plan.get("layout") or {}
    daily = (plan.get("cost") or {}).get("dollars_per_day")
    restarts, previous = read_restarts(run, started, moment)
    begun = [float(line["time"]) for line in events if line["event"] == "agent_started"]
    began = newest.time if newest and newest.time else max(begun, default=None)
    broke = [line for line in events if line["event"] == "generation_started" and line.get("reason") != "start"]
    on = read_submission(run).on
    number = newest.number if newest else started
    per_node = newest.ranks_per_node if newest else int(launch.get("ranks_per_node") or 0)
    return RunFacts(
        name=run.name,
        kind=str(plan.get("kind") or ("command" if not plan else "")),
        on=on,
        paths=paths_of(run, on),
        state=summary.state,
        message=summary.message,
        unsaved=summary.unsaved,
        rescued=_rescued(run) if summary.state in ("done", "stopped") else "",
        storage=summary.storage,
        nodes=tuple(str(node) for node in nodes),
        ranks_per_node=per_node,
        leaves={str(node): str(leaf) for node, leaf in (launch.get("leaves") or {}).items() if leaf},
        layout={name: int(layout[name]) for name in LAYOUT if isinstance(layout.get(name), int)},
        is_accelerated=bool(launch["gpus"]) if "gpus" in launch else None,
        generation=number,
        generation_began=began,
        is_stopped_by_user=stopped_by_user(run),
        is_stopped_by_scheduler=stopped_by_scheduler(run),
        signalled=signalled_ranks(events, number) if summary.state == "stopped" else (),
        stuck=stuck_ranks(events, number, len(nodes) * per_node) if summary.state in ("failed", "stopping") else (),
        unacknowledged=unacknowledged_peers(events, number) if summary.state in ("failed", "stopping") else {},
        previous_began=previous,
        restarts=sum(not line.get("planned") for line in broke),
        recent_restarts=restarts,
        step=summary.step or None,
        steps=summary.steps,
        updated_at=summary.updated_at if newest is None or (summary.updated_at or 0.0) >= newest.time else None,
        plan=plan_twins(plan),
        step_seconds_low=plan.get("step_seconds_low"),
        step_seconds_high=plan.get("step_seconds_high"),
        ledger=dict(summary.ledger),
        dollars_per_hour=float(daily) / 24.0 if isinstance(daily, int | float) else None,
        has_ended=summary.state in ("done", "failed", "stopped", "lost"),
    )


def _rescued(run: RunDirectory) -> str:
    """Return where the last state of a run is, if no tier stored it."""
    rescue = find_rescue(run)
    return f"its state of step {rescue.step:,} is in {rescue.path}, not in its tier: {rescue.reason}" if rescue else ""


def _ranks(
    steps: Mapping[int, Steps],
    facts: RunFacts,
    statuses: Mapping[str, NodeStatus | None],
    events: Sequence[Mapping[str, Any]],
    moment: float,
) -> tuple[SnapshotRank, ...]:
    ended = {
        line["rank"]: line
        for line in events
        if line["event"] == "rank_ended"
        and isinstance(line.get("rank"), int)
        and line.get("generation") == facts.generation
    }
    started = {
        line["rank"]: float(line.get("time") or 0.0)
        for line in events
        if line["event"] == "rank_started" and isinstance(line.get("rank"), int)
    }
    filled = []
    for number in range(facts.world):
        node = facts.nodes[number // facts.ranks_per_node]
        rank = SnapshotRank(number, node, number % facts.ranks_per_node if facts.is_accelerated else None)
        rank = _with_steps(rank, steps.get(number))
        rank = _with_status(rank, statuses.get(node), facts, moment)
        end = ended.get(number)
        if end is not None and float(end.get("time") or 0.0) >= started.get(number, 0.0):
            rank = replace(
                rank,
                is_alive=False,
                exit_code=end.get("code") if isinstance(end.get("code"), int) else None,
                ended_at=float(end.get("time") or 0.0),
                ended_in=str(end.get("during") or ""),
                was_ended=was_sent(end),
                is_stopped=None,
            )
        filled.append(rank)
    return tuple(filled)


def _with_steps(rank: SnapshotRank, steps: Steps | None) -> SnapshotRank:
    if steps is None:
        return rank
    (recent, num_recent), (earlier, num_earlier) = steps.median(recent=True), steps.median(recent=False)
    last = steps.lines[-1]
    return replace(
        rank,
        node=steps.node,
        step=int(last.get("step") or 0),
        step_seconds=recent.get("step"),
        recorded_at=float(last.get("time") or 0.0) or None,
        recent=recent,
        earlier=earlier,
        num_recent=num_recent,
        num_earlier=num_earlier,
        work_deviation_seconds=steps.work_deviation(),
        memory_bytes=steps.newest("run_memory_bytes"),
        gradient_norm=steps.lasting("run_rank_gradient_norm"),
        gradient_norm_usual=steps.usual("run_rank_gradient_norm"),
        windows=steps.windows(),
    )


def _with_status(rank: SnapshotRank, status: NodeStatus | None, facts: RunFacts, moment: float) -> SnapshotRank:
    if status is None or status.generation != facts.generation or facts.has_ended:
        return rank
    rank_status = next((item for item in status.ranks if item.rank == rank.rank), None)
    if rank_status is None:
        return rank
    has_pace, is_stepping = bool(rank_status.step_seconds), rank_status.kind in ("productive", "redo")
    return replace(
        rank,
        pid=rank_status.pid,
        kind=rank_status.kind,
        beside=rank_status.beside,
        step=max(rank_status.step, rank.step or 0) or None,
        step_seconds=rank_status.step_seconds or rank.step_seconds,
        progress_age_seconds=age_of(rank_status, status.age_seconds(moment)),
        # Before the agent knows the step time, the limit of a step is that of a start.
        progress_limit_seconds=(rank_status.progress_limit_seconds or None) if has_pace or not is_stepping else None,
        is_stopped=rank_status.is_stopped,
        process_state=rank_status.process_state,
        is_alive=True,
        slowest_seconds=rank_status.slowest_seconds or None,
        starved_seconds=rank_status.starved_seconds,
        patience_seconds=rank_status.patience_seconds or None,
        phase_seconds=dict(rank_status.phase_seconds),
        is_eager=rank_status.is_eager,
        frame=rank_status.frame,
        is_user_frame=rank_status.is_user_frame if rank_status.frame else None,
        is_waiting=rank_status.is_waiting if rank_status.frame else None,
        wait_channels=rank_status.wait_channels,
        resources=rank_status.resources if rank_status.resources.cpus else None,
        peers=rank_status.peers,
    )


def _node(
    name: str,
    beat: Heartbeat | None,
    host: str,
    facts: RunFacts,
    launch: Mapping[str, Any],
    plan: Mapping[str, Any],
    moment: float,
    is_live: bool,
) -> SnapshotNode:
    is_present = beat is not None and (beat.generation >= int(launch.get("generation") or 0))
    instance = (plan.get("cluster") or {}).get("instance") or {}
    has_efa = bool(launch.get("gpus")) and bool(instance.get("efa_version"))
    cards = int(launch.get("gpus_per_node") or launch.get("ranks_per_node") or 0) if launch.get("gpus") else 0
    return SnapshotNode(
        name=name,
        leaf=facts.leaves.get(name, ""),
        host_name=host,
        address=beat.address.rpartition(":")[0].strip("[]") if beat else "",
        heartbeat_age_seconds=beat_age(beat, moment, is_live) if beat and is_present else None,
        clock_offset_seconds=clock_offset(beat) if beat and is_present and is_live and not facts.has_ended else None,
        heartbeat_state=beat.state if beat and is_present and not (facts.has_ended and facts.state == "done") else "",
        expected_gpus=cards or None,
        expected_fabric=int(instance.get("network_interfaces") or 0) or None if has_efa else None,
    )
