"""`craton doctor`: find problems of this node, or of nodes of a cluster, with evidence and remedy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from craton.orchestration.preflight import Diagnosis

STYLES = {"ok": "green", "note": "cyan", "warn": "yellow", "fail": "bold red"}


def doctor(
    nodes: Annotated[
        str | None,
        typer.Argument(
            metavar="[NODES]",
            help="Nodes of the Slurm cluster of this machine, e.g. g\\[1-4] \\[default: this machine].",
            show_default=False,
        ),
    ] = None,
    root: Annotated[
        Path | None,
        typer.Option(metavar="IMAGE", help="Check a node image in this folder instead.", show_default=False),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Expected hardware: a cluster file or a catalog name \\[default: detected from the node].",
            show_default=False,
        ),
    ] = None,
    compute: Annotated[
        bool, typer.Option("--compute", help="Repeat the same matmuls on every GPU for 20 s, and compare the results.")
    ] = False,
    bandwidth: Annotated[
        bool,
        typer.Option(
            "--bandwidth", help="Measure all-reduce bandwidth in pairs for up to 60 s, and find the slow node."
        ),
    ] = False,
    run: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="Check this machine as a node of a run: against its job, launch and environment.",
            show_default=False,
        ),
    ] = None,
    nccl_log: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|RUN",
            help="Report the network NCCL uses, from the log of a rank or all logs of a run (NCCL_DEBUG=INFO).",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check for silent degradation: GPUs, network, storage, limits, versions. Exit code 1 if a check fails."""
    import json

    from craton.cli.views.live import make_console
    from craton.errors import CratonError
    from craton.orchestration.preflight import diagnose, diagnose_nccl_log
    from craton.orchestration.slurm import diagnose_nodes
    from craton.telemetry import find_run

    if nodes is not None and root is not None:
        raise CratonError("--root checks the image of one node; omit NODES")
    if run is not None and (nodes is not None or cluster is not None or nccl_log is not None):
        raise CratonError("--run defines the expected hardware; omit NODES, --cluster and --nccl-log")
    if nccl_log is not None and (nodes is not None or root is not None or compute or bandwidth):
        raise CratonError("--nccl-log only reads a run's logs; omit NODES, --root, --compute and --bandwidth")
    if nccl_log is not None:
        diagnosis = diagnose_nccl_log(nccl_log, cluster)
    elif nodes is not None:
        diagnosis = diagnose_nodes(nodes, cluster, compute=compute, bandwidth=bandwidth)
    else:
        asked = find_run(run) if run is not None else None
        diagnosis = diagnose(root, cluster, run=asked, compute=compute, bandwidth=bandwidth)
    if as_json:
        print(json.dumps(diagnosis.to_json()))
    else:
        _show(diagnosis, make_console())
    raise typer.Exit(1 if any(finding.severity == "fail" for finding in diagnosis.findings) else 0)


def _show(diagnosis: Diagnosis, console: Console) -> None:
    from collections import Counter

    from rich import box
    from rich.table import Table
    from rich.text import Text

    several = len(diagnosis.nodes) > 1
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("", *(["NODE"] if several else []), "CHECK", "EVIDENCE", "WHAT TO DO"):
        table.add_column(column, no_wrap=column in ("", "NODE", "CHECK"), overflow="fold")
    for finding in diagnosis.findings:
        if several and finding.severity == "ok":
            continue
        table.add_row(
            Text(finding.severity, style=STYLES[finding.severity]),
            *([finding.node] if several else []),
            finding.what,
            Text(finding.evidence),
            Text(finding.remedy if finding.severity != "ok" else "", style="dim"),
        )
    console.print(table, highlight=False)
    counted = Counter(finding.severity for finding in diagnosis.findings)
    message = ", ".join(
        f"{counted[severity]} {severity}" for severity in ("fail", "warn", "note", "ok") if counted[severity]
    )
    if not diagnosis.nodes:
        console.print(message, markup=False)
        return
    names = ", ".join(f"{node['node']} ({node['instance'] or 'not in the catalog'})" for node in diagnosis.nodes[:4])
    more = f" and {len(diagnosis.nodes) - 4} more" if len(diagnosis.nodes) > 4 else ""
    console.print(f"{names}{more}: {message}", markup=False, soft_wrap=True)
