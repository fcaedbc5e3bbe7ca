"""generations/N.json: one membership of a run. Recovery and resize write the next one.

A generation starts when its file is created, which only one agent can do. So two agents that both believe they
coordinate, on the two sides of a network partition, cannot both continue. Generations are never changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from craton.telemetry import RunDirectory, read_json
from craton.telemetry.files import names_in

if TYPE_CHECKING:
    from craton.agent.launch import Launch

_FILE = re.compile(r"(\d{6,})\.json")


@dataclass(frozen=True)
class Generation:
    """The members of a run from this generation on: nodes, ranks, rendezvous store, layout."""

    number: int
    nodes: list[str]  # in the order of ranks
    ranks_per_node: int
    store: str  # host:port of the ranks' rendezvous
    keepers: dict[str, str] = field(default_factory=dict)  # node → host:port that receives other nodes' state
    layout: dict[str, Any] | None = None  # None: that of the plan
    reason: str = "start"
    reached: int = 0  # the last step done before; steps up to it are redone
    is_planned: bool = False  # no failure caused it: the ranks first finish their step and keep its state
    broke_at: float = 0.0  # epoch seconds at which the previous generation failed; 0: it did not
    failures: int = 0  # consecutive failures without a new step, until this generation began
    failed_at: int = -1  # the step of the last of them
    by: str = ""  # the node that coordinates
    time: float = 0.0

    @property
    def world(self) -> int:
        return len(self.nodes) * self.ranks_per_node

    def ranks_of(self, node: str) -> range:
        """Return the ranks of a node; none if it is not part of this generation."""
        if node not in self.nodes:
            return range(0)
        first = self.nodes.index(node) * self.ranks_per_node
        return range(first, first + self.ranks_per_node)

    def to_message(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_message(cls, document: dict[str, Any]) -> Generation:
        names = {item.name for item in fields(cls)}
        return cls(**{name: value for name, value in document.items() if name in names})


def create_generation(run: RunDirectory, generation: Generation) -> bool:
    """Create the generation; False if another agent has created this number. OSError if the disk refuses it."""
    path = run.generation_path(generation.number)
    path.parent.mkdir(exist_ok=True)
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(fresh, "w", encoding="utf-8") as file:
            json.dump(generation.to_message(), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.link(fresh, path)
    except FileExistsError:
        return False
    finally:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
    return True


def newest_generation(run: RunDirectory) -> Generation | None:
    """Return the newest generation that can be read; None if there is none."""
    for number in sorted(_numbers(run), reverse=True):
        try:
            return Generation.from_message(read_json(run.generation_path(number)))
        except TypeError:
            continue
    return None


def next_number(run: RunDirectory) -> int:
    return max(_numbers(run), default=-1) + 1


def count_restarts(run: RunDirectory, first: int) -> int:
    """Return how many generations, from this number on, began because of a failure."""
    return sum(
        1 for number in _numbers(run) if number >= first and read_json(run.generation_path(number)).get("broke_at")
    )


def first_nodes(run: RunDirectory, first: int) -> set[str]:
    """Return the nodes that have had rank 0, in the generations from this number on."""
    documents = (read_json(run.generation_path(number)) for number in _numbers(run) if number >= first)
    return {str(document["nodes"][0]) for document in documents if document.get("nodes")}


def _numbers(run: RunDirectory) -> list[int]:
    try:
        names = names_in(run.path / "generations")
    except OSError:
        return []
    return [int(match[1]) for name in names if (match := _FILE.fullmatch(name))]


def first_ranks(launch: Launch, node: int, present: Generation | None) -> range:
    """Return the ranks whose ledger the agent of a node starts: its ranks in the current generation, or in the first
    one."""
    if present is not None and present.number >= launch.generation:
        return present.ranks_of(launch.nodes[node])
    if node >= launch.working_nodes:
        return range(0)
    return range(node * launch.ranks_per_node, (node + 1) * launch.ranks_per_node)
