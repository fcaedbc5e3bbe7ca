"""Nodes that a run is to leave for a spare, as long as it has one: RUN/avoid.json, written by whoever heals a cluster.

A wish and no more. The coordinator begins a planned generation without such a node when enough others are ready, so no
step is lost; a run that has nobody else keeps the node. Taking the wish back makes the node a spare again.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping

from craton.telemetry import RunDirectory, read_json

AVOID_FILE = "avoid.json"


def avoid_node(run: RunDirectory, node: str, mark: str = "") -> None:
    """`mark` says who wants it, for whoever takes it back."""
    _write(run, {**read_avoided(run), node: mark})


def welcome_node(run: RunDirectory, node: str) -> None:
    """Takes the wish back."""
    _write(run, {item: mark for item, mark in read_avoided(run).items() if item != node})


def forget_avoided(run: RunDirectory) -> None:
    """A new start has its nodes from a scheduler, which knows what is out; names mean other machines then."""
    (run.path / AVOID_FILE).unlink(missing_ok=True)


def read_avoided(run: RunDirectory) -> dict[str, str]:
    """Node → the mark of who wants it to be left."""
    nodes = read_json(run.path / AVOID_FILE).get("nodes")
    return {str(node): str(mark) for node, mark in nodes.items()} if isinstance(nodes, dict) else {}


def _write(run: RunDirectory, nodes: Mapping[str, str]) -> None:
    path = run.path / AVOID_FILE
    fresh = path.with_name(f".{AVOID_FILE}.{secrets.token_hex(8)}")
    fresh.write_text(json.dumps({"nodes": dict(sorted(nodes.items()))}) + "\n", encoding="utf-8")
    os.replace(fresh, path)
