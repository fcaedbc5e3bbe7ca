"""`craton observe`: node exporter, Prometheus and Alertmanager for runs or a cluster, and files for your own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Metrics, alert rules and dashboards for nodes and runs.", no_args_is_help=True)


@app.callback()
def _observe() -> None:
    """Metrics, alert rules and dashboards for nodes and runs."""


@app.command()
def node(
    port: Annotated[int, typer.Option(help="Port to serve on; 0 picks a free one.")] = 9500,
    listen: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to serve on.")] = "127.0.0.1",
    root: Annotated[Path, typer.Option(help="Root folder of the node: /, a mount point, or an image.")] = Path("/"),
    nvml: Annotated[
        str, typer.Option(metavar="auto|off", help="Read GPU metrics from the NVIDIA driver (NVML).")
    ] = "auto",
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="NODE",
            help="Value of the label `node` on every metric \\[default: the host name].",
            show_default=False,
        ),
    ] = None,
    leaf: Annotated[
        str, typer.Option(help="Value of the label `leaf` on every metric: the leaf switch of the node.")
    ] = "",
    runs: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder of the runs \\[default: $CRATON_RUNS, else ./runs].", show_default=False
        ),
    ] = None,
    fsx: Annotated[
        str, typer.Option(metavar="off|auto|ID,...", help="FSx file systems to read from CloudWatch.")
    ] = "off",
    node_exporter: Annotated[
        str, typer.Option(metavar="off|URL", help="Omit metrics that a node_exporter at this address already serves.")
    ] = "http://127.0.0.1:9100/metrics",
    once: Annotated[bool, typer.Option("--once", help="Print one scrape and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the address, or the scrape, as JSON.")] = False,
) -> None:
    """Export one node's metrics: GPUs, network, file systems, drives and CPUs. Ctrl-C ends it."""
    import json
    import signal
    import threading

    from craton.errors import CratonError
    from craton.infrastructure.probes import NodeRoot
    from craton.observability.exporter import ExporterServer, NodeExporter, cards_of, find_duplicates, fsx_bridge

    if not root.is_dir():
        raise CratonError(f"--root {root} is not a folder; use /, the mount point of a node, or an image")
    at = NodeRoot(root.absolute())
    bridge = fsx_bridge(fsx, at)
    duplicates = find_duplicates(
        "off" if at.is_recorded else node_exporter
    )  # an image comes from another host than this one
    exporter = NodeExporter(
        at,
        node=name or "",
        leaf=leaf,
        runs_folder=runs,
        open_cards=cards_of(at, nvml),
        more=[bridge] if bridge else [],
        duplicates=duplicates,
    )
    if duplicates is not None:
        duplicates.wait_first()
    if once:
        text = exporter.scrape()
        print(json.dumps({"node": exporter.node, "metrics": text}) if as_json else text, end="\n" if as_json else "")
        exporter.close()
        return
    server = ExporterServer(exporter, listen, port)
    left_out = sorted(duplicates.names) if duplicates is not None else []
    if as_json:
        print(json.dumps({"node": exporter.node, "url": server.url, "left_out": left_out}), flush=True)
    else:
        without = f", without {len(left_out)} metric families that {node_exporter} serves" if left_out else ""
        print(f"metrics of {exporter.node} at {server.url}{without}", flush=True)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    signal.signal(signal.SIGINT, lambda *_: ended.set())
    ended.wait()
    server.close()
    exporter.close()


@app.command()
def up(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Run to observe \\[default: all runs].", show_default=False)
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Cluster file: observe its runs, nodes and scheduler.", show_default=False),
    ] = None,
    port: Annotated[int, typer.Option(help="Port of Prometheus; Alertmanager uses this port + 3.")] = 9090,
    listen: Annotated[str, typer.Option(metavar="ADDRESS", help="Address both listen on.")] = "127.0.0.1",
    no_alertmanager: Annotated[bool, typer.Option("--no-alertmanager", help="Start Prometheus only.")] = False,
    webhook: Annotated[
        str | None, typer.Option(metavar="URL", help="Alertmanager webhook URL.", show_default=False)
    ] = None,
    runbooks: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Base URL of Craton's docs/runbooks, for links in alerts.", show_default=False
        ),
    ] = None,
    every: Annotated[str, typer.Option(metavar="SECONDS", help="Scrape and evaluation interval.")] = "5s",
    for_: Annotated[
        str | None,
        typer.Option("--for", metavar="TIME", help="Duration, e.g. 10m \\[default: until Ctrl-C].", show_default=False),
    ] = None,
    targets: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Start nothing; only keep the target files in DIR up to date, for an existing Prometheus.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Local folder of the metrics \\[default: one per set of runs in ~/.local/state/craton].",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per change.")] = False,
) -> None:
    """Start Prometheus and Alertmanager for a run, all runs or a cluster. Ctrl-C ends both; metrics are kept."""
    import json

    from craton.cli.views.live import make_console
    from craton.cli.views.observe import ended_by_signal, keep_targets, show_until
    from craton.job.cluster import load_cluster
    from craton.observability.prometheus import Observer, ObserverSettings, TargetKeeper
    from craton.telemetry import find_run

    settings = ObserverSettings(
        runs=(find_run(run),) if run is not None else (),
        cluster=load_cluster(cluster) if cluster is not None else None,
        host=listen,
        port=port,
        every_seconds=_seconds("--every", every),
        alertmanager=not no_alertmanager,
        webhook=webhook,
        runbooks=runbooks,
        data=data,
    )
    seconds = _seconds("--for", for_) if for_ is not None else None
    console = make_console(as_json)
    observed = observer = None
    try:
        with ended_by_signal():
            if targets is not None:
                console.print(f"updating the target files in {targets}; Ctrl-C ends it", markup=False)
                keeper = TargetKeeper(settings, targets.absolute())
                keep_targets(keeper, settings.every_seconds, seconds, console, as_json)
                return
            with Observer(settings) as observer:
                urls = {service.name: service.url for service in observer.services}
                if as_json:
                    places = {"folder": str(observer.folder), "data": str(observer.data)}
                    print(json.dumps({"event": "started", **urls, **places}), flush=True)
                for name, url in urls.items():
                    console.print(f"{name} {url}", markup=False)
                if not observer.keeper.targets:
                    console.print(observer.keeper.why_empty(), style="yellow", markup=False, soft_wrap=True)
                observed = show_until(observer, console, as_json, seconds)
    except KeyboardInterrupt:
        pass  # Ctrl-C is the normal end
    if as_json:
        print(
            json.dumps({"event": "ended", "firing": [alert["name"] for alert in observed.firing] if observed else []})
        )
    else:
        kept = f"; metrics are kept in {observer.data}" if observer else ""
        console.print(f"ended{kept}", markup=False, soft_wrap=True)


@app.command()
def render(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write to.")],
    cluster: Annotated[Path | None, typer.Option(metavar="FILE", help="Cluster file.", show_default=False)] = None,
    webhook: Annotated[
        str | None, typer.Option(metavar="URL", help="Alertmanager webhook URL.", show_default=False)
    ] = None,
    runbooks: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Base URL of Craton's docs/runbooks, for links in alerts.", show_default=False
        ),
    ] = None,
    amp: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Amazon Managed Prometheus workspace to write to.", show_default=False),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Label on the Prometheus Operator objects, e.g. release=NAME for kube-prometheus-stack; repeatable.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the file names as JSON.")] = False,
) -> None:
    """Write rules, scrape configuration and dashboards for your own Prometheus, Alertmanager and Grafana."""
    import json

    from craton.cli.views.live import make_console
    from craton.errors import CratonError
    from craton.job.cluster import load_cluster
    from craton.observability.dashboards import dashboard_files
    from craton.observability.prometheus import NO_DASHBOARDS, NO_EXPORTER, lacks_exporter, write_private
    from craton.observability.prometheus import render as rendered

    labels = dict(_key_and_value("--label", item) for item in label or [])
    files = rendered(
        load_cluster(cluster) if cluster is not None else None, webhook, amp, labels, runbooks, dashboard_files
    )
    try:
        for name, text in files.items():
            path = out / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if webhook is not None and path.name == "alertmanager.yml":
                write_private(path, text)
            else:
                path.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = f"{error.strerror}: {error.filename}"
        raise CratonError(f"cannot write to --out {out} ({reason}); choose a writable folder") from None
    console = make_console(as_json)
    if not any(name.startswith("grafana/dashboards/") for name in files):
        console.print(NO_DASHBOARDS, style="yellow", markup=False, soft_wrap=True)
    if lacks_exporter(files):
        console.print(NO_EXPORTER, style="yellow", markup=False, soft_wrap=True)
    if as_json:
        print(json.dumps({"folder": str(out), "files": sorted(files)}))
        return
    for name in sorted(files):
        console.print(str(out / name), markup=False, soft_wrap=True)


def _key_and_value(option: str, text: str) -> tuple[str, str]:
    from craton.errors import CratonError

    key, sign, value = text.partition("=")
    if not (key and sign):
        raise CratonError(f"{option} {text!r} is not KEY=VALUE; write e.g. {option} release=prometheus")
    return key, value


def _seconds(option: str, value: str) -> float:
    from craton.errors import CratonError
    from craton.job.document import parse_seconds

    try:
        return parse_seconds(value)
    except ValueError as error:
        raise CratonError(f"{option}: {error}") from None
