"""Nodes that a run should replace by a spare if it has one: RUN/avoid.json, written by `craton heal`.

This is a request, not a guarantee. The coordinator starts a planned generation without such a node once enough others
are ready, so no step is lost; a run without a spare keeps the node. Removing the request makes the node a spare again.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping

from craton.telemetry import RunDirectory, read_json

AVOID_FILE = "avoid.json"


def avoid_node(run: RunDirectory, node: str, mark: str = "") -> None:
    """Request that the run avoids a node; `mark` names the requester, who may remove the request."""
    _write(run, {**read_avoided(run), node: mark})


def welcome_node(run: RunDirectory, node: str) -> None:
    """Remove the request."""
    _write(run, {item: mark for item, mark in read_avoided(run).items() if item != node})


def forget_avoided(run: RunDirectory) -> None:
    """Remove all requests: a new start gets its nodes from the scheduler, and names may mean other machines."""
    (run.path / AVOID_FILE).unlink(missing_ok=True)


def read_avoided(run: RunDirectory) -> dict[str, str]:
    """Return node → mark of the requester."""
    nodes = read_json(run.path / AVOID_FILE).get("nodes")
    return {str(node): str(mark) for node, mark in nodes.items()} if isinstance(nodes, dict) else {}


def _write(run: RunDirectory, nodes: Mapping[str, str]) -> None:
    path = run.path / AVOID_FILE
    fresh = path.with_name(f".{AVOID_FILE}.{secrets.token_hex(8)}")
    fresh.write_text(json.dumps({"nodes": dict(sorted(nodes.items()))}) + "\n", encoding="utf-8")
    os.replace(fresh, path)
