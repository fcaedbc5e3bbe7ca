"""Pre-flight of a run on this machine: `craton run` checks its GPUs before it starts an agent.

Nodes that share a machine share its state, so it is probed once and judged for every node by its assigned GPUs. A run
without GPUs only reads files, which takes milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from craton.agent import Launch
from craton.infrastructure.probes import NodeReport, NodeRoot, probe_node
from craton.job import Job
from craton.orchestration.errors import StartError
from craton.orchestration.preflight.finding import Expected, PreflightFinding, for_job
from craton.orchestration.preflight.host import check_group, check_limits, check_processors, check_shared_memory
from craton.orchestration.preflight.node_check import expected_by, followed, judge, record_preflight
from craton.orchestration.preflight.sharing import check_sharing
from craton.telemetry import RunDirectory

VISIBLE = "CUDA_VISIBLE_DEVICES"


def check_local(
    run: RunDirectory,
    job: Job,
    launch: Launch,
    root: NodeRoot | None = None,
    nodes: Sequence[str] | None = None,
) -> None:
    """Check every node, or these, and record an event for each; StartError for a GPU that would fail the run, slow it
    down or compute wrong results."""
    place = root or NodeRoot(files_only=not launch.gpus)
    begin = time.monotonic()
    report = probe_node(place)
    sharing = check_sharing(launch, {**place.environment, **launch.env})
    for node in launch.nodes if nodes is None else nodes:
        node_findings = _of_node(report, job, launch, node, place, sharing) if launch.gpus else _by_files(report)
        findings = [replace(finding, node=node) for finding in node_findings]
        record_preflight(run, launch.generation, node, findings, time.monotonic() - begin)
        failed = [finding for finding in findings if finding.severity == "fail"]
        if failed:
            others = f" (and {len(failed) - 1} more: see `craton doctor`)" if len(failed) > 1 else ""
            raise StartError(
                f"this machine failed pre-flight: {failed[0].evidence}{others}; {failed[0].remedy}; to overrule, set "
                f"`run: {{preflight_ignore: [{', '.join(dict.fromkeys(item.what for item in failed))}]}}`"
            )


def used_cards(report: NodeReport, visible: str) -> NodeReport:
    """Return the report without GPUs that CUDA_VISIBLE_DEVICES hides: their faults do not concern this run."""
    cards = report.gpus.cards
    names = [name.strip() for name in visible.split(",") if name.strip()]
    used = tuple(card for card in cards if any(name == str(card.index) or card.uuid.startswith(name) for name in names))
    if not used:  # MIG slices have names that nvidia-smi does not list here
        return report
    others = tuple(card.bus_id for card in cards if card not in used)
    xids = tuple(xid for xid in report.kernel_log.xids if not any(bus.startswith(xid.bus_id) for bus in others))
    return replace(report, gpus=replace(report.gpus, cards=used), kernel_log=replace(report.kernel_log, xids=xids))


def _of_node(
    report: NodeReport, job: Job, launch: Launch, node: str, root: NodeRoot, sharing: list[PreflightFinding]
) -> list[PreflightFinding]:
    environment = {**root.environment, **launch.env}
    visible = launch.cards.get(node, environment.get(VISIBLE, ""))
    # All nodes are on this machine: nothing goes over a network.
    expected = replace(followed(expected_by(job, launch), root, report), needs_network=False)
    findings = [*judge(used_cards(report, visible), expected, environment), *sharing]
    return for_job(findings, job)


def _by_files(report: NodeReport) -> list[PreflightFinding]:
    nothing = Expected()
    return [
        *check_shared_memory(report),
        *check_limits(report),
        *check_processors(report, nothing),
        *check_group(report),
    ]
