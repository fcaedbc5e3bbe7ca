"""`craton cluster discover`: find the network topology of nodes. `craton cluster provision`: write AWS files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Discover a cluster's network topology; write the files that create a cluster on AWS.", no_args_is_help=True
)


@app.callback()
def _cluster() -> None:
    """Discover a cluster's network topology; write the files that create a cluster on AWS."""


@app.command()
def discover(
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="SOURCE",
            help="slurm, kubernetes, ec2, or a file with their output \\[default: the scheduler found here].",
            show_default=False,
        ),
    ] = None,
    write: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FORMAT",
            help="Output format: slurm-tree, slurm-block, slurm-yaml, kueue, kai, volcano or levels; repeatable "
            "\\[default: a summary].",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to \\[default: print to the terminal].", show_default=False)
    ] = None,
    name: Annotated[str, typer.Option(help="Name of Kueue's or KAI's Topology object.")] = "fabric",
    names: Annotated[
        Path | None,
        typer.Option(
            help="With ec2: JSON that maps instance to node name, or the output of `aws ec2 describe-instances`.",
            show_default=False,
        ),
    ] = None,
    region: Annotated[str | None, typer.Option(help="With ec2: AWS region.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the topology as JSON.")] = False,
) -> None:
    """Discover which nodes share which switches, and write the topology for a scheduler."""
    from craton.infrastructure import TopologyError
    from craton.infrastructure.topology import discover as discover_topology
    from craton.infrastructure.topology import read_instance_names
    from craton.infrastructure.topology import written as written_topology

    called = read_instance_names(_text_of(names)) if names else None
    topology = discover_topology(source, called, region)
    texts: dict[str, str] = {}
    for form in dict.fromkeys(write or ()):
        file, text = written_topology(topology, form, name)
        if file in texts:
            raise TopologyError(
                f"--write {form}: another format is also written to {file}; run discover once per format"
            )
        texts[file] = text
    paths = _write(texts, out) if out else []
    if as_json:
        shown = {"topology": topology.to_json(), "summary": topology.sentences()}
        print(json.dumps({**shown, "files": [str(path) for path in paths] if out else texts}, indent=2))
        return
    for line in topology.sentences() if out or not texts else ():
        print(line)
    for path in paths:
        print(f"wrote {path}")
    for text in () if out else texts.values():
        print(text, end="")


@app.command()
def provision(
    file: Annotated[Path, typer.Argument(metavar="CLUSTER", help="Cluster file with an `aws:` section.")],
    target: Annotated[
        str,
        typer.Option(
            "--for", metavar="KIND", help="Target: parallelcluster, hyperpod-slurm, hyperpod-eks, eks or pcs."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to; required without --dry-run.", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the files instead of writing them.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the files, notes and steps as JSON.")] = False,
) -> None:
    """Write the files that create this cluster on AWS. Creates nothing and calls no cloud API."""
    from craton.infrastructure import ProvisionError
    from craton.infrastructure.aws import provision as render
    from craton.job.cluster import load_cluster

    if out is None and not dry_run:
        raise ProvisionError(["use --out DIR to write the files, or --dry-run to print them"])
    rendered = render(load_cluster(file), target)
    paths = _write(rendered.files, out) if out and not dry_run else []
    if as_json:
        document = {"target": rendered.target, "notes": list(rendered.notes), "steps": list(rendered.steps)}
        print(json.dumps({**document, "files": [str(path) for path in paths] if paths else rendered.files}, indent=2))
        return
    if dry_run:
        for name, text in rendered.files.items():
            print(f"=== {name}\n{text}", end="")
        return
    for path in paths:
        print(f"wrote {path}")
    for note in rendered.notes:
        print(f"note: {note}")
    print(f"next: read {out}/README.md; nothing was created")


def _text_of(names: Path) -> str:
    from craton.infrastructure import TopologyError

    try:
        return names.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TopologyError(f"--names {names}: cannot be read ({error}); give a JSON file") from None


def _write(texts: Mapping[str, str], folder: Path) -> list[Path]:
    """Write the files and replace existing ones; scripts become executable."""
    paths = []
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755 if name.endswith(".sh") else 0o644)
        paths.append(path)
    return paths
