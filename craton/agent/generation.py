"""generations/N.json: one membership of a run. Recovery and resize write the next one.

A generation is made by creating its file, which only one agent can do: two that both take themselves for the
coordinator, on the two sides of a network that is cut, cannot both go on. Generations are never changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from craton.telemetry import RunDirectory, read_json
from craton.telemetry.files import names_in

_FILE = re.compile(r"(\d{6,})\.json")


@dataclass(frozen=True)
class Generation:
    """Who the ranks are from here on."""

    number: int
    nodes: list[str]  # in the order of ranks
    ranks_per_node: int
    store: str  # host:port of the ranks' rendezvous
    keepers: dict[str, str] = field(default_factory=dict)  # node → host:port where it takes copies of others' state
    layout: dict[str, Any] | None = None  # None: that of the plan
    reason: str = "start"
    reached: int = 0  # the last step that was done before; up to it, steps are done again
    is_planned: bool = False  # a change nobody died for: the ranks finish their step and keep its state first
    broke_at: float = 0.0  # epoch seconds at which the one before stopped moving; 0: it did not
    failures: int = 0  # in a row without a new step between them, until this one began
    failed_at: int = -1  # the step of the last of them
    by: str = ""  # the node that coordinates
    time: float = 0.0

    @property
    def world(self) -> int:
        return len(self.nodes) * self.ranks_per_node

    def ranks_of(self, node: str) -> range:
        """The ranks of a node; none where it has no part in this generation."""
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
    """False when somebody else has made one of this number. OSError when the run directory cannot be written."""
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
    """The newest there is; one that cannot be read is not there."""
    for number in sorted(_numbers(run), reverse=True):
        try:
            return Generation.from_message(read_json(run.generation_path(number)))
        except TypeError:
            continue
    return None


def next_number(run: RunDirectory) -> int:
    return max(_numbers(run), default=-1) + 1


def count_restarts(run: RunDirectory, first: int) -> int:
    """How many generations, from this number on, began because something broke."""
    return sum(
        1 for number in _numbers(run) if number >= first and read_json(run.generation_path(number)).get("broke_at")
    )


def first_nodes(run: RunDirectory, first: int) -> set[str]:
    """The nodes that have had rank 0 in the generations from this number on."""
    documents = (read_json(run.generation_path(number)) for number in _numbers(run) if number >= first)
    return {str(document["nodes"][0]) for document in documents if document.get("nodes")}


def _numbers(run: RunDirectory) -> list[int]:
    try:
        names = names_in(run.path / "generations")
    except OSError:
        return []
    return [int(match[1]) for name in names if (match := _FILE.fullmatch(name))]
