"""Rules for the program: exit codes, hangs, log patterns, slow phases and server overload."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from craton.formatting import counted, percent, whole_duration
from craton.observability.diagnosis.rules.findings import (
    CRASHES,
    finding,
    named,
)
from craton.observability.diagnosis.rules.resources import more_work
from craton.observability.diagnosis.snapshot import LogMatch, Snapshot, SnapshotRank
from craton.observability.diagnosis.symptoms import odd_by_output
from craton.observability.diagnosis.tables import log_pattern, threshold
from craton.observability.diagnosis.verdict import (
    ABANDONED,
    FAILING,
    IDLE,
    LINGERS,
    OVERLOAD,
    PAUSED,
    RESTARTS,
    SILENT,
    STALLED,
    Condition,
    Finding,
    Symptom,
    Symptoms,
)
from craton.telemetry import ROLLOUT_PHASES
from craton.telemetry.node import FROZEN, WAITS_FOR_FILES, WAITS_FOR_LOCK, WAITS_FOR_MEMORY, sleeps_for

# Timers and pipes: the program or one of its libraries caused them, and nothing handled them.
OWN_SIGNALS = (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGPIPE)
FRAMES = (
    (re.compile(r"FileLock|inductor|_dynamo|triton.*compil|nvcc|ninja", re.IGNORECASE), "compile_hung"),
    (re.compile(r"checkpoint|torch/serialization|fsync|\bsave\b", re.IGNORECASE), "checkpoint_hung"),
    (re.compile(r"dataloader|_next_data|loader|\bdata\b.*\b(read|next|get)\b", re.IGNORECASE), "data_hung"),
)
HANGS_IN = {
    "compile": "compile_hung",
    "data": "data_hung",
    "checkpoint": "checkpoint_hung",
    "rollout": "rollout_hung",
    "reward": "verifier_hung",
    "sync": "weight_sync_hung",
}
DOING = {
    "data": "loading data",
    "checkpoint": "saving",
    "compile": "compiling",
    "evaluate": "evaluating",
    "rollout": "generating samples",
    "reward": "verifying samples",
    "sync": "sending weights to the rollouts",
}
SLOW_PHASES = {
    "compute": "compute_slow",
    "optimizer": "optimizer_slow",
}
RECENT_LOG_SECONDS = 900.0
# How TORCH_DISTRIBUTED_DEBUG=DETAIL reports a mismatch (seen with torch 2.13): each rank lists its own call first.
_CALLED = re.compile(r"Rank (?P<rank>\d+) is running collective: .*?OpType=(\w+).*?TensorShape=(\[[^\]]*\])")


def examine_framework(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    return [
        *_ended(snapshot, symptoms),
        *_logs(snapshot, symptoms),
        *_hangs(snapshot, symptoms),
        *_starts(snapshot, symptoms),
        *_slow(snapshot, symptoms),
        *_overload(snapshot, symptoms),
        *_requests(symptoms),
        *_rests(symptoms),
        *_lingers(snapshot, symptoms),
    ]


def _ended(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    """Explain how the first failed rank ended; signals from outside belong to the host rules."""
    findings: list[Finding] = []
    for symptom in symptoms.of("dead"):
        if symptom.sign == "stopped":
            continue
        if symptom.sign == "hung":
            findings += _ended_hanging(symptom, snapshot, symptoms)
            continue
        for number in symptom.ranks:
            rank = snapshot.rank(number)
            code = rank.exit_code if rank is not None else None
            if rank is None or code is None or _broke_off(number, snapshot):
                continue
            during = f" in phase {rank.ended_in}" if rank.ended_in else ""
            if -code in CRASHES or code - 128 in CRASHES:
                name = signal.Signals(-code if code < 0 else code - 128).name
                message = f"rank {number} on {rank.node} crashed ({name}){during}"
                findings += finding(
                    symptoms, "program_crashed", message, ("dead",), node=rank.node, rank=number, base=0.85
                )
            elif -code in OWN_SIGNALS or code - 128 in OWN_SIGNALS:
                name = signal.Signals(-code if code < 0 else code - 128).name
                message = f"rank {number} on {rank.node} was ended by {name}{during}, which programs send to themselves"
                findings += finding(symptoms, "own_signal", message, ("dead",), node=rank.node, rank=number, base=0.85)
            elif code > 0 and code not in (137, 143):
                message = f"rank {number} on {rank.node} exited by itself with code {code}{during}"
                findings += finding(symptoms, "rank_failed", message, ("dead",), node=rank.node, rank=number, base=0.75)
    return findings


def _broke_off(number: int, snapshot: Snapshot) -> bool:
    """Return whether the log of a rank only reports that its connection to another rank closed."""
    patterns = [log_pattern(match.pattern) for match in snapshot.logs if match.rank == number]
    known_patterns = [pattern for pattern in patterns if pattern is not None]
    return bool(known_patterns) and all(pattern.is_echo for pattern in known_patterns)


def _ended_hanging(symptom: Symptom, snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    """Explain a run that was ended for lack of progress; all ranks waited for the one with another activity."""
    culprits = [rank for number in symptom.ranks if (rank := snapshot.rank(number)) is not None]
    message = symptom.sentence.splitlines()[0] if symptom.sentence else "no rank made progress"
    stuck = snapshot.run.stuck
    if not culprits and stuck and len(stuck) == len(snapshot.ranks):
        text = "all ranks waited for each other in a collective, and none was late"
        evidence = [message, text, stuck[0].sentence]
        return finding(symptoms, "collective_stuck", text, ("dead",), evidence=evidence, base=0.95)
    if not culprits:
        return finding(symptoms, "rank_hung", message, ("dead",), base=0.6)
    kind = culprits[0].ended_in.partition("+")[0]
    place = next((rank for rank in stuck if rank.rank == culprits[0].rank), None)
    evidence = [message, place.sentence if place else f"{_them(culprits)} ended in phase {kind}"]
    one = culprits[0].rank if len(culprits) == 1 else None
    node = symptom.nodes[0] if len(symptom.nodes) == 1 else ""
    cause = _of_source(HANGS_IN.get(kind, "rank_hung"), snapshot)
    if place is None and culprits == odd_by_output(snapshot):
        message = f"the last output of {_them(culprits)} differs from that of the others: {culprits[0].last_line}"
    if place is not None and place.is_user_frame:
        cause = "user_code_blocked"
    channels = (*(place.wait_channels if place else ()), *culprits[0].wait_channels)
    if any(FROZEN.search(channel) for channel in channels):
        cause, message = "rank_frozen", f"{_them(culprits)} {_are(culprits)} frozen by a cgroup (freezer)"
    elif any(WAITS_FOR_MEMORY.search(channel) for channel in channels):
        cause, message = "memory_limit_reached", _short_of_memory(culprits[0])
    elif any(WAITS_FOR_FILES.search(channel) for channel in channels):
        cause, message = "storage_stalled", f"rank {culprits[0].rank} on {culprits[0].node} waits for a file system"
    return finding(symptoms, cause, message, ("dead",), evidence=evidence, node=node, rank=one, base=0.85)


def _short_of_memory(rank: SnapshotRank) -> str:
    return f"rank {rank.rank} on {rank.node} waits in the kernel for memory: its cgroup is at its limit"


def _logs(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    """Explain failures by log patterns. A broken connection does not explain why the other rank failed."""
    findings: list[Finding] = []
    # A pattern counts once: the victim's own line if there is one, else the first.
    by_pattern: dict[str, list[LogMatch]] = {}
    for match in snapshot.logs:
        by_pattern.setdefault(match.pattern, []).append(match)
    ended = [*symptoms.of("dead", "hung"), *symptoms.signed(RESTARTS)]
    victims = {rank for symptom in ended for rank in symptom.ranks}
    own = {name for name, matches in by_pattern.items() if any(match.rank in victims for match in matches)}
    for name, matches in by_pattern.items():
        pattern = log_pattern(name)
        if pattern is None:
            continue
        match = next((entry for entry in matches if entry.rank in victims), matches[0])
        if (
            match.moment is not None
            and snapshot.moment - match.moment > RECENT_LOG_SECONDS
            and symptoms.condition == "healthy"
        ):
            continue
        explains: tuple[Condition, ...] = ("dead", "hung")
        phases: tuple[str, ...] = ()
        base = 0.97
        if pattern.is_echo:
            base = 0.55
        elif name == "exception":
            base = 0.8
        elif name == "killed":
            base = 0.6
        elif name == "network_socket":
            if not any(node.fabric for node in snapshot.nodes):
                continue  # there may be no faster network
            explains, phases = ("slow",), ("communication",)
        elif name == "recompiling":
            explains, phases = ("slow",), ("compute",)
        elif pattern.cause in ("storage_stalled", "storage_full", "storage_read_only"):
            explains, phases = ("dead", "hung", "slow"), ("data", "checkpoint")
        if name == "exception" and own - {"exception"}:
            base = 0.5  # a more specific line of the same log explains the exception
        of = f"rank {match.rank}" if match.rank is not None else match.node or "a node"
        message = f"the log of {of} shows that {pattern.meaning}"
        rank = snapshot.rank(match.rank) if match.rank is not None else None
        log_findings = finding(
            symptoms,
            pattern.cause,
            message,
            explains,
            evidence=[f"{of}: {match.line.strip()[:200]}"],
            node=rank.node if rank is not None else match.node,
            rank=match.rank,
            base=base,
            phases=phases,
        )
        odd, why = None, ""
        if pattern.is_echo:
            odd, why = _lost_by_all(snapshot), "ran until it was ended: it is the rank that the others lost"
        elif name == "collective_mismatch":
            odd, why = _calls_another(snapshot, matches), "called another collective than the others"
        if odd is not None:
            evidence = f"only rank {odd.rank} on {odd.node} {why}"
            log_findings = [
                replace(item, node=odd.node, rank=odd.rank, evidence=(*item.evidence, evidence))
                for item in log_findings
            ]
        findings += log_findings
    return findings


def _calls_another(snapshot: Snapshot, matches: Sequence[LogMatch]) -> SnapshotRank | None:
    """Return the one rank whose log shows another collective, or another size, than all others."""
    calls = {
        match.rank: called.groups()
        for match in matches
        if match.rank is not None and (called := _CALLED.search(match.line)) and int(called["rank"]) == match.rank
    }
    kinds = Counter(call[1:] for call in calls.values())
    if len(calls) < 3 or len(kinds) != 2 or min(kinds.values()) > 1:
        return None
    odd = next(rank for rank, item in calls.items() if kinds[item[1:]] == 1)
    return snapshot.rank(odd)


def _lost_by_all(snapshot: Snapshot) -> SnapshotRank | None:
    """Return the one rank that was ended from outside, if all others failed because a connection broke."""
    others = [rank for rank in snapshot.ranks if rank.exit_code is None or rank.exit_code <= 0]
    if len(others) != 1 or len(snapshot.ranks) < 3 or others[0].exit_code != -signal.SIGTERM:
        return None
    is_theirs = all(_broke_off(rank.rank, snapshot) for rank in snapshot.ranks if rank is not others[0])
    return others[0] if is_theirs else None


def _hangs(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    findings: list[Finding] = []
    if symptoms.signed(SILENT):
        text = "the front end of the server does not answer, although its processes are alive"
        findings += finding(symptoms, "server_silent", text, ("hung",), base=0.95)
    if symptoms.signed(STALLED):
        text = "the engine computes nothing for its running requests and uses no CPU: it waits for something else"
        findings += finding(symptoms, "server_stalled", text, ("hung",), base=0.95)
    for symptom in symptoms.of("hung"):
        if symptom.sign == LINGERS:
            continue
        culprits = [rank for number in symptom.ranks if (rank := snapshot.rank(number)) is not None]
        culprits = [rank for rank in culprits if not rank.is_stopped]
        if not symptom.ranks and snapshot.ranks and all(rank.is_waiting for rank in snapshot.ranks):
            text = "all ranks wait for each other in a collective, and none is late"
            findings += finding(symptoms, "collective_stuck", text, ("hung",), base=0.95)
        elif not symptom.ranks and snapshot.run.kind == "command" and len(snapshot.ranks) > 1 and not symptom.sign:
            text = f"none of the {len(snapshot.ranks)} processes of the command reports a new step"
            findings += finding(symptoms, "collective_stuck", text, ("hung",), base=0.7)
        kinds = {rank.kind for rank in snapshot.ranks}
        if not symptom.ranks and len(kinds) == 1 and kinds <= set(ROLLOUT_PHASES):
            (kind,) = kinds
            text = f"all ranks stopped making progress while {DOING[kind]}"
            findings += finding(symptoms, HANGS_IN[kind], text, ("hung",), base=0.9)
        findings += _locked(snapshot, symptoms)
        if not culprits:
            continue
        first = culprits[0]
        stack = " | ".join(first.stack[:6])
        by_stack = next((cause for words, cause in FRAMES if stack and words.search(stack)), None)
        if any(FROZEN.search(channel) for channel in first.wait_channels):
            text = f"rank {first.rank} on {first.node} is frozen by its cgroup (freezer); all other ranks wait for it"
            findings += finding(symptoms, "rank_frozen", text, ("hung",), node=first.node, rank=first.rank, base=1.0)
            continue
        if any(WAITS_FOR_MEMORY.search(channel) for channel in first.wait_channels):
            text = _short_of_memory(first)
            findings += finding(
                symptoms, "memory_limit_reached", text, ("hung",), node=first.node, rank=first.rank, base=1.0
            )
            continue
        cause = _user_code(first) or _of_source(HANGS_IN.get(first.kind) or by_stack or "rank_hung", snapshot)
        them = "it" if len(culprits) == 1 else "them"
        message = f"{_them(culprits)} {_stalled(culprits, snapshot)}; all other ranks wait for {them}"
        if culprits == odd_by_output(snapshot):
            message = f"the last output of {_them(culprits)} differs from that of the others: {first.last_line}"
        if not first.frame and (sleeps := _sleeps(first)):
            message = f"{_them(culprits)} {sleeps}; all other ranks wait for {them}"
        if first.frame:
            does = "runs" if first.process_state == "R" else "waits"
            message += f"; it {does} in {first.frame}"
        evidence = [message, *([f"the stack of rank {first.rank}: {stack[:300]}"] if stack else [])]
        nodes = symptom.nodes
        base = 0.9 if 4 * len(culprits) <= len(snapshot.ranks) or len(culprits) == 1 else 0.7
        findings += finding(
            symptoms,
            cause,
            message,
            ("hung",),
            evidence=evidence,
            node=nodes[0] if len(nodes) == 1 else "",
            rank=first.rank if len(culprits) == 1 else None,
            base=base,
        )
    return findings


def _sleeps(rank: SnapshotRank) -> str:
    """Return what its main thread sleeps for, by the kernel, if no other rank ends that; "" otherwise."""
    channel = rank.resources.sleeps_in if rank.resources is not None else ""
    return f"sleeps for {words} ({channel}, by the kernel)" if (words := sleeps_for(channel)) else ""


def _locked(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    """Blame a lock on a file for which ranks wait in the kernel: another process holds it."""
    waiting = [rank for rank in snapshot.ranks if any(WAITS_FOR_LOCK.search(channel) for channel in rank.wait_channels)]
    if not waiting:
        return []
    is_one = len(waiting) == 1 and len(snapshot.ranks) > 1
    where = f" in {waiting[0].frame}" if waiting[0].frame else ""
    text = f"{_them(waiting)} {_are(waiting)} waiting for a lock on a file that another process holds{where}"
    node, rank = (waiting[0].node, waiting[0].rank) if is_one else ("", None)
    return finding(symptoms, "file_locked", text, ("hung",), node=node, rank=rank, base=1.0)


def _starts(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    """Explain a slow start by the user's own code, where stacks show that ranks are in it."""
    if not symptoms.of("starting"):
        return []
    if idle := symptoms.signed(IDLE):
        return finding(symptoms, "command_idle", idle[0].evidence[0], ("starting",), evidence=idle[0].evidence)
    inside = [rank for rank in snapshot.ranks if rank.kind == "start" and _user_code(rank)]
    if not inside:
        return []
    first = max(inside, key=lambda rank: rank.progress_age_seconds or 0.0)
    code = "your own code"
    if snapshot.training is not None and snapshot.training.source:
        code += f" (data source `{snapshot.training.source}`, a model or an objective)"
    who = "every rank is" if len(inside) == len(snapshot.ranks) else f"{_them(inside)} {_are(inside)}"
    seconds = whole_duration(first.progress_age_seconds or 0.0)
    message = f"{who} in {code} before the first step, {seconds} after the start: {first.frame}"
    is_one = len(inside) == 1 and len(snapshot.ranks) > 1
    return finding(
        symptoms,
        "start_in_user_code",
        message,
        ("starting",),
        node=first.node if is_one else "",
        rank=first.rank if is_one else None,
        base=0.95,
    )


def _are(ranks: Sequence[SnapshotRank]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _of_source(cause: str, snapshot: Snapshot) -> str:
    """Return the cause for a run whose data come from the user's function: that is code, not storage."""
    is_function = snapshot.training is not None and bool(snapshot.training.source)
    return "data_source_hung" if cause == "data_hung" and is_function else cause


def _user_code(rank: SnapshotRank) -> str:
    """Return the cause if the rank is in the user's own code, and not in a file system below it."""
    in_files = any(WAITS_FOR_FILES.search(channel) for channel in (*rank.wait_channels, rank.wait_channel))
    return "user_code_blocked" if rank.is_user_frame and not in_files else ""


def _them(ranks: list[SnapshotRank]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0].rank} on {ranks[0].node}"
    nodes = list(dict.fromkeys(rank.node for rank in ranks))
    return f"{counted(len(ranks), 'rank')} on {named(nodes)}"


def _stalled(ranks: list[SnapshotRank], snapshot: Snapshot) -> str:
    first = ranks[0]
    words = DOING.get(first.kind, f"in phase {first.kind}" if first.kind else "in an unknown phase")
    newest = max((rank.step for rank in snapshot.ranks if rank.step is not None), default=None)
    step = f" at step {first.step}" if first.step is not None else ""
    if newest is not None and first.step is not None and first.step < newest:
        step += f" while others are at step {newest}"
    age = first.progress_age_seconds or 0.0
    return f"stopped making progress {whole_duration(age)} ago, {words}{step}"


def _slow(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    findings: list[Finding] = []
    for symptom in symptoms.of("slow"):
        if symptom.phase == "evaluate":
            message = "evaluation takes most of the time of the run"
            findings += finding(
                symptoms, "evaluation_dominates", message, ("slow",), evidence=symptom.evidence, phases=("evaluate",)
            )
            continue
        is_of_command = snapshot.run.kind == "command" and not symptom.phase
        if (
            symptom.phase not in SLOW_PHASES
            and not is_of_command
            and not (symptom.ranks and symptom.phase not in ("data", "checkpoint"))
        ):
            continue
        if symptom.ranks:
            one_rank = symptom.ranks[0] if len(symptom.ranks) == 1 else None
            one_node = symptom.nodes[0] if len(symptom.nodes) == 1 else ""
            findings += finding(
                symptoms,
                "straggler",
                _straggles(symptom),
                ("slow",),
                evidence=symptom.evidence,
                node=one_node,
                rank=one_rank,
                leaf=symptom.leaf,
                base=0.9,
                phases=(symptom.phase,),
            )
            continue
        if is_of_command:
            work = more_work(snapshot, snapshot.ranks)
            reason = f"does more: {work}" if work else "no resource of its processes explains it"
            message = f"every step of the command takes longer than before, and {reason}"
            findings += finding(symptoms, "command_slow", message, ("slow",), evidence=symptom.evidence, base=0.9)
            continue
        cause = "slower_than_plan" if symptom.since_start else SLOW_PHASES[symptom.phase]
        message = f"every rank takes longer in {symptom.phase}" + (
            ", since the first step" if symptom.since_start else " than before"
        )
        if work := more_work(snapshot, snapshot.ranks):
            message += f": {work}"
        findings += finding(
            symptoms, cause, message, ("slow",), evidence=symptom.evidence, base=0.9, phases=(symptom.phase,)
        )
    return findings


def _straggles(symptom: Symptom) -> str:
    one = len(symptom.ranks) == 1
    who = f"rank {symptom.ranks[0]} on" if one else f"ranks {named(symptom.ranks)} on"
    where = symptom.leaf or named(symptom.nodes)
    takes = "takes" if one else "take"
    return f"{who} {where} {takes} longer in {symptom.phase} than the others, for no observed reason"


def _requests(symptoms: Symptoms) -> list[Finding]:
    """Explain requests that clients give up, or that end with errors."""
    findings: list[Finding] = []
    for symptom in symptoms.signed(ABANDONED):
        text = "clients give up before their answers end"
        findings += finding(
            symptoms, "requests_abandoned", text, ("slow",), evidence=symptom.evidence, base=1.05, phases=("queue",)
        )
    for symptom in symptoms.signed(FAILING):
        text = "most requests end with an error of the engine"
        findings += finding(symptoms, "requests_failing", text, ("wrong",), evidence=symptom.evidence, base=1.05)
    return findings


def _rests(symptoms: Symptoms) -> list[Finding]:
    return [
        item
        for symptom in symptoms.signed(PAUSED)
        for item in finding(symptoms, "server_paused", symptom.sentence, ("waiting",))
    ]


def _lingers(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    findings: list[Finding] = []
    for symptom in symptoms.signed(LINGERS):
        left = [rank for number in symptom.ranks if (rank := snapshot.rank(number)) is not None]
        text = (
            f"{_them(left)} {_are(left)} alive and {'uses' if len(left) == 1 else 'use'} no CPU; the others have ended"
        )
        findings += finding(
            symptoms,
            "command_lingers",
            text,
            ("hung",),
            evidence=symptom.evidence,
            node=left[0].node if len(symptom.nodes) == 1 else "",
            rank=left[0].rank if len(left) == 1 else None,
            base=1.05,
        )
    return findings


def _overload(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    serving = snapshot.serving
    if serving is None or not symptoms.signed(OVERLOAD):
        return []
    preempted = serving.preemptions or 0
    evidence = [f"{preempted} running requests were preempted for lack of KV cache blocks"] if preempted else []
    cause, message = "server_overloaded", "requests arrive faster than the server completes them"
    if (serving.kv_share or 0.0) > threshold("kv_share"):
        cause, message = "server_memory_full", f"{percent(serving.kv_share)} of the KV cache is in use"
    return finding(symptoms, cause, message, ("slow",), evidence=[message, *evidence], base=0.95, phases=("queue",))
