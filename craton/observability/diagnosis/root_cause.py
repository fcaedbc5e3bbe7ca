"""Root-cause analysis: from a snapshot to one verdict.

The symptoms come first. Then the rules of each layer run in the order scheduler, devices, fabric, collectives,
framework, training, rollouts, storage, host, limits of processes, restarts, members. A finding is weighed by the
quality of its evidence and by whether its victim matches the symptom. A finding that only says *where* gives way to one
that says *why* for the same victim. Two faults are two findings: the more severe one first, the other in `others`. When
nothing explains the condition, the verdict is "not enough evidence" (`cannot_tell`), with the evidence that is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from craton.infrastructure.probes import HEALTH_ACTIONS
from craton.observability.diagnosis.rules import (
    examine_collectives,
    examine_connections,
    examine_devices,
    examine_errors,
    examine_fabric,
    examine_framework,
    examine_host,
    examine_members,
    examine_resources,
    examine_restarts,
    examine_rollouts,
    examine_scheduler,
    examine_serving,
    examine_storage,
    examine_training,
)
from craton.observability.diagnosis.sentences import action_of, paragraph
from craton.observability.diagnosis.snapshot import Snapshot, SnapshotGpu, SnapshotNode
from craton.observability.diagnosis.symptoms import symptoms_of
from craton.observability.diagnosis.tables import LAYERS
from craton.observability.diagnosis.verdict import (
    IDLE,
    OVERLOAD,
    RESTARTS,
    TROUBLED,
    Finding,
    Symptom,
    Symptoms,
    Verdict,
)

EXAMINATIONS: tuple[Callable[[Snapshot, Symptoms], list[Finding]], ...] = (
    examine_scheduler,
    examine_errors,
    examine_devices,
    examine_fabric,
    examine_connections,
    examine_collectives,
    examine_framework,
    examine_serving,
    examine_training,
    examine_rollouts,
    examine_storage,
    examine_host,
    examine_resources,
    examine_restarts,
    examine_members,
)
CANNOT_TELL = "cannot_tell"
MIN_SCORE = 0.3  # a finding below this explains nothing
MIN_OTHER = 0.45  # a weaker further finding is not reported
CANNOT_TELL_CONFIDENCE = 0.6
STARTING_CONFIDENCE = 0.85  # a start that is too slow looks like any other for a while
SURE = 0.97  # maximum confidence
HEALTHY_CONFIDENCE = 0.88  # in the live benches a tenth of the faults showed no symptom that is known
ALSO_MAIN_SHARE = 0.4  # of the loss of the first symptom
HOURS_PER_DAY = 24.0
HOLDS_NODES = ("starting", "running", "stopping")  # of telemetry.RunState
# Unexplained slowness is attributed to the program only where GPUs and hosts were observed.
GUESSED = ("straggler", "compute_slow")
# A fault of these layers ends a program through an exception of its own; it must be certain to outrank the report.
BELOW_PROGRAMS = ("scheduler", "device")
SURE_STRENGTH = 0.9


def diagnose(snapshot: Snapshot) -> Verdict:
    """Return the verdict on a snapshot."""
    symptoms = symptoms_of(snapshot)
    findings = merged([item for examine in EXAMINATIONS for item in examine(snapshot, symptoms)])
    condition = symptoms.condition
    if condition in TROUBLED or condition in ("waiting", "starting"):
        verdict = _explained(snapshot, symptoms, findings)
    elif condition == "healthy":
        verdict = _at_risk(snapshot, symptoms, findings)
    elif condition == "unknown":
        would = (f"query the scheduler from a machine that can reach it: {symptoms.first.sentence}",)
        if symptoms.first.sign == IDLE:
            would = ("set progress.pattern in the job file to what the command prints in every step",)
        others = _others([finding for finding in findings if finding.is_risk], None, symptoms)
        verdict = Verdict(
            "unknown", cause=CANNOT_TELL, confidence=CANNOT_TELL_CONFIDENCE, would_tell=would, others=others
        )
    elif condition == "stopped" and any(finding.symptom == 0 for finding in findings):
        verdict = _explained(snapshot, symptoms, findings)
    else:
        # What it learned stays wrong after its end.
        wrong = [number for number, symptom in enumerate(symptoms.all) if symptom.condition == "wrong"]
        others = _others([finding for finding in findings if finding.symptom in wrong], None, symptoms)
        verdict = Verdict(condition, confidence=SURE, others=others)
    verdict = replace(verdict, cost_dollars_per_day=_cost(snapshot, verdict), since=symptoms.first.since)
    return replace(verdict, sentence=paragraph(snapshot, symptoms, verdict))


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """Merge findings with the same cause and victim; more evidence makes the merged finding stronger."""
    by_key: dict[tuple[str, str, int | None, str], Finding] = {}
    for finding in findings:
        # One cause on many GPUs of a node is one fault.
        key = (finding.cause, finding.node, finding.rank, finding.leaf)
        if key in by_key:
            before = by_key[key]
            evidence = tuple(dict.fromkeys((*before.evidence, *finding.evidence)))
            best = max(before, finding, key=lambda one: one.strength)
            both = 1.0 - (1.0 - min(1.0, before.strength)) * (1.0 - 0.5 * min(1.0, finding.strength))
            by_key[key] = replace(
                best,
                evidence=evidence,
                strength=max(best.strength, both),
                health=_gravest(before, finding),
                is_urgent=before.is_urgent or finding.is_urgent,
            )
        else:
            by_key[key] = finding
    return list(by_key.values())


def _gravest(*findings: Finding) -> str:
    asked = {finding.health for finding in findings}
    return next((action for action in reversed(HEALTH_ACTIONS) if action in asked), "")


def _explained(snapshot: Snapshot, symptoms: Symptoms, findings: list[Finding]) -> Verdict:
    first = symptoms.first
    candidates = [finding for finding in findings if finding.symptom in _main_symptoms(symptoms)]
    candidates = sorted(candidates, key=_rank_of, reverse=True)
    chosen = _best(candidates)
    if chosen is not None and chosen.cause in GUESSED and not _is_seen(snapshot, first):
        chosen = None
    others = _others(findings, chosen, symptoms)
    if chosen is None:
        if first.condition == "starting":
            return Verdict("starting", evidence=first.evidence, confidence=STARTING_CONFIDENCE, others=others)
        return Verdict(
            first.condition,
            node=first.nodes[0] if len(first.nodes) == 1 else "",
            rank=first.ranks[0] if len(first.ranks) == 1 else None,
            cause=CANNOT_TELL,
            evidence=first.evidence,
            confidence=CANNOT_TELL_CONFIDENCE,
            would_tell=_missing_evidence(snapshot, symptoms),
            others=others,
            lost_share=first.lost_share,
        )
    rivals = [
        candidate
        for candidate in candidates
        if candidate.layer != chosen.layer and not candidate.about.is_symptom and candidate is not chosen
    ]
    doubt = max((_score(rival) for rival in rivals if _same_victim(rival, chosen)), default=0.0)
    confidence = min(SURE, chosen.about.confidence * (0.7 + 0.3 * min(1.0, chosen.strength)) - 0.15 * doubt)
    if chosen.first_hand is not None:
        confidence = chosen.first_hand
    node, rank = _victim(snapshot, first, chosen)
    return Verdict(
        first.condition,
        layer=chosen.layer,
        node=node,
        rank=rank,
        leaf=chosen.leaf or first.leaf,
        cause=chosen.cause,
        because=chosen.sentence,
        evidence=tuple(dict.fromkeys((*first.evidence, *chosen.evidence))),
        confidence=round(max(0.05, confidence), 3),
        action=action_of(snapshot, first, chosen, node, rank),
        would_tell=_missing_evidence(snapshot, symptoms)
        if chosen.about.is_symptom and chosen.first_hand is None
        else (),
        others=others,
        lost_share=chosen.lost_share,
        health=chosen.health,
        moment=chosen.moment,
        is_urgent=chosen.is_urgent,
        is_first_hand=chosen.first_hand is not None,
    )


def _main_symptoms(symptoms: Symptoms) -> list[int]:
    """Return the indices of the symptoms that the verdict is about: the first one, and of a run that is slow as a whole
    a straggler that costs about as much: one cause may make all steps longer, and one rank the slowest."""
    first = symptoms.first
    if first.condition != "slow" or first.ranks or not first.lost_share or first.sign in (RESTARTS, OVERLOAD):
        return [0]
    return [
        number
        for number, symptom in enumerate(symptoms.all)
        if symptom.condition == "slow" and (symptom.lost_share or 0.0) >= ALSO_MAIN_SHARE * first.lost_share
    ]


def _missing_evidence(snapshot: Snapshot, symptoms: Symptoms) -> tuple[str, ...]:
    """Return how to get the evidence that is missing, as imperative clauses, the most useful first."""
    symptom = symptoms.first
    nodes = [node for node in snapshot.nodes if not symptom.nodes or node.name in symptom.nodes] or list(snapshot.nodes)
    is_accelerated = snapshot.run.is_accelerated is not False
    names: list[str] = []
    if symptom.condition == "hung":
        if is_accelerated and not snapshot.collectives.ras_asked:
            names.append(
                "query NCCL RAS on a node of the run (`ncclras`, NCCL 2.24 or newer) for ranks that are behind"
            )
        if is_accelerated and snapshot.run.kind == "command" and not snapshot.collectives.recorders_read:
            names.append(
                "set TORCH_FR_BUFFER_SIZE and TORCH_NCCL_DUMP_ON_TIMEOUT: the flight recorder names the collective"
            )
        if not any(rank.stack for rank in snapshot.ranks):
            names.append("install py-spy and run `craton why` on a node of the run to get the stacks of its ranks")
        if not any(rank.kind for rank in snapshot.ranks):
            names.append("check status/NODE.json in the run directory: no agent reports what the ranks are doing")
    breaks_again = symptom.sign == RESTARTS
    if symptom.condition == "slow" and not breaks_again and not any(rank.earlier for rank in snapshot.ranks):
        names.append("wait for more steps: there are too few for a comparison")
    if symptom.condition == "dead" or breaks_again:
        if not snapshot.logs:
            names.append(f"read the last lines of the logs (`craton logs {snapshot.run.name}`)")
        if not any(node.host is not None for node in nodes):
            names.append("check the kernel log of the node for killed processes and driver errors")
    if symptom.condition == "wrong" and symptom.sign != "odd_rank":
        return _missing_of_training(snapshot, nodes)
    waits_for_data = symptom.condition == "slow" and symptom.phase == "data"
    if waits_for_data:
        names.append("time the data loader alone, without training: whether it, or the file system below it, is slow")
    if is_accelerated and not waits_for_data and not any(node.gpus_known for node in nodes):
        names.append(
            "pass `--prometheus URL` of a Prometheus that scrapes the nodes, or run `craton why` there: GPU health"
        )
    if len(snapshot.run.nodes) > 1 and is_accelerated and not any(node.fabric for node in nodes):
        names.append("export the counters of the NICs (`craton observe up`): retransmissions and link state")
    if (symptom.phase in ("", "data", "checkpoint") or symptom.condition != "slow") and not any(
        mount.operation_seconds is not None or mount.is_stalled is not None for node in nodes for mount in node.mounts
    ):
        names.append("export file system statistics: throughput and latency are not known")
    if not any(node.host is not None for node in nodes):
        names.append("export host load, memory and pressure, which are not known")
    if not names:
        names.append("take another snapshot in a minute and compare: every check passed")
    return tuple(names)


def _missing_of_training(snapshot: Snapshot, nodes: Sequence[SnapshotNode]) -> tuple[str, ...]:
    """Return what would tell more about wrong numbers: hosts and file systems would not."""
    names = []
    if snapshot.training is not None and snapshot.bad_steps and not any(bad.place for bad in snapshot.bad_steps):
        names.append("look at the samples of the first bad step: no rank found where the bad number began")
    if snapshot.run.is_accelerated is not False and not any(node.gpus_known for node in nodes):
        names.append(
            "pass `--prometheus URL` of a Prometheus that scrapes the nodes, or run `craton why` there: GPU health"
        )
    return tuple(names)


def _best(candidates: list[Finding]) -> Finding | None:
    """Return the best explanation: what a process reported about its own end, unless hardware or the scheduler caused
    it; then one that says why before one that says where, if it is good enough."""
    reported = next((item for item in candidates if item.first_hand is not None), None)
    if reported is not None:
        below = [item for item in candidates if item.layer in BELOW_PROGRAMS and item.strength >= SURE_STRENGTH]
        ends_program = [item for item in below if not item.about.is_symptom and item.first_hand is None]
        return next(iter(ends_program), reported)
    why = [item for item in candidates if not item.about.is_symptom and _score(item) >= MIN_SCORE]
    where = [candidate for candidate in candidates if candidate.about.is_symptom and _score(candidate) >= MIN_SCORE]
    if why and where:
        # A cause with another victim than the symptom does not explain it.
        return why[0] if why[0].strength >= 0.5 * where[0].strength + 0.1 else where[0]
    return next(iter(why or where), None)


def _is_seen(snapshot: Snapshot, symptom: Symptom) -> bool:
    """Return whether GPU speed and host load were observed on the nodes of the slow ranks."""
    nodes = [node for node in snapshot.nodes if not symptom.nodes or node.name in symptom.nodes]
    cards = snapshot.run.is_accelerated is False or all(node.gpus_known and _has_speed(node.gpus) for node in nodes)
    hosts = [node.host for node in nodes]
    return (
        cards
        and bool(nodes)
        and all(host and (host.load is not None or host.processor_pressure is not None) for host in hosts)
    )


def _has_speed(gpus: Sequence[SnapshotGpu]) -> bool:
    """Return whether the clocks and the throttling of these GPUs are known."""
    return all(
        gpu.sm_clock_mhz is not None and (gpu.throttle is not None or gpu.throttled_share is not None) for gpu in gpus
    )


def _others(findings: list[Finding], chosen: Finding | None, symptoms: Symptoms) -> tuple[Finding, ...]:
    """Return further faults, without consequences of the chosen one and without mere locations."""
    others: list[Finding] = []
    for finding in sorted(findings, key=_rank_of, reverse=True):
        strength = max(finding.strength, finding.evidence_strength if finding.is_risk else 0.0)
        if finding is chosen or strength < MIN_OTHER:
            continue
        named = [one for one in (chosen, *others) if one is not None]
        if any(_belongs(finding, one, symptoms) for one in named):
            continue
        others.append(finding)
    return tuple(others)


def _belongs(finding: Finding, named: Finding, symptoms: Symptoms) -> bool:
    """Return whether a finding adds nothing to one that is already reported."""
    if finding.cause == named.cause and (finding.node == named.node or not finding.node):
        return True
    same_symptom = finding.symptom is not None and finding.symptom == named.symptom
    if finding.about.is_symptom and same_symptom:
        return True
    # A failure or a hang shows in several layers with the same victim. A cluster-wide fault, such as a full file
    # system, is independent.
    has_victim = bool(finding.node) or finding.rank is not None or not finding.is_risk
    is_an_end = symptoms.condition in ("dead", "hung") or symptoms.first.sign == RESTARTS
    if same_symptom and is_an_end and has_victim and _same_victim(finding, named):
        return True
    return finding.cause == "node_lost" and named.cause in ("node_down", "agents_gone")


def _same_victim(one: Finding, other: Finding) -> bool:
    if one.rank is not None and other.rank is not None:
        return one.rank == other.rank
    if one.node and other.node:
        return one.node == other.node
    return True


def _at_risk(snapshot: Snapshot, symptoms: Symptoms, findings: list[Finding]) -> Verdict:
    """Return the verdict on a healthy run, with its risks."""
    risks = sorted((finding for finding in findings if finding.is_risk), key=_rank_of, reverse=True)
    if not risks:
        return Verdict("healthy", confidence=HEALTHY_CONFIDENCE)
    first = risks[0]
    others = _others(risks, first, symptoms)
    return Verdict(
        "healthy",
        layer=first.layer,
        node=first.node,
        rank=first.rank,
        leaf=first.leaf,
        cause=first.cause,
        because=first.sentence,
        evidence=first.evidence,
        confidence=round(first.about.confidence * min(1.0, first.strength), 3),
        action=action_of(snapshot, symptoms.first, first, first.node, first.rank),
        others=others,
        health=first.health,
        moment=first.moment,
        is_urgent=first.is_urgent,
    )


def _victim(snapshot: Snapshot, symptom: Symptom, chosen: Finding) -> tuple[str, int | None]:
    """Return the node and rank of a verdict: those of the finding, else the only ones of the symptom."""
    node, rank = chosen.node, chosen.rank
    if chosen.leaf and not node:
        return "", None
    has_no_victim = not node and rank is None
    if has_no_victim and chosen.about.is_symptom and chosen.first_hand is None:
        node = symptom.nodes[0] if len(symptom.nodes) == 1 else ""
        rank = symptom.ranks[0] if len(symptom.ranks) == 1 else None
    if node and rank is None and len(symptom.ranks) == 1 and symptom.nodes == (node,):
        rank = symptom.ranks[0]
    if rank is not None and not node:
        rank_state = snapshot.rank(rank)
        node = rank_state.node if rank_state is not None else ""
    return node, rank


def _cost(snapshot: Snapshot, verdict: Verdict) -> float | None:
    """Return the cost per day: the lost share of the time times the price of the nodes. A dead run costs the full price
    while it holds its nodes."""
    hourly = snapshot.run.dollars_per_hour
    is_held = verdict.condition == "dead" and snapshot.run.state in HOLDS_NODES
    if hourly is None or not (is_held or verdict.condition in ("slow", "hung", "wrong")):
        return None
    share = verdict.lost_share if verdict.lost_share is not None else (0.0 if verdict.condition == "slow" else 1.0)
    return round(share * hourly * HOURS_PER_DAY, 2)


def _score(finding: Finding) -> float:
    return min(1.0, finding.strength) * finding.about.confidence


def _rank_of(finding: Finding) -> tuple[float, int]:
    return round(_score(finding), 3), -LAYERS.index(finding.layer)
