"""Map the processes on a GPU to runs and ranks.

The environment of a process names its run and rank (CRATON_RUN, RANK; SLURM_JOB_ID). A forked rank lacks its number
there, and another user's environment may be unreadable; then the status files of the runs on this node map PIDs, also
those of a rank's children. Inside a container these are container PIDs, so the process' environment must name its run
and node. Status files are read elsewhere (`RunsHere.look`): this module opens only this node's own procfs, so a hung
shared file system removes no GPU series.

Labels outlive a process by GRACE_SECONDS unless another process arrives: an error that ends its job must be counted
under the job's labels, or the increase falls between two series and no rule sees it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from craton.infrastructure.probes import NodeRoot
from craton.observability.exporter.runs_here import RunsHere
from craton.telemetry import name_by_path

GRACE_SECONDS = 60.0
FIRST_LOOK_SECONDS = 1.0  # wait of the first query for a scan, so that series start with their labels
BELIEVED_SECONDS = 600.0  # how long a PID is believed to be the rank that a scan found
MAX_PARENTS = 16
_NUMBERS = re.compile(rb"^NSpid:\t([\d\t]+)$", re.MULTILINE)


@dataclass(frozen=True)
class Occupant:
    """One rank of a run, or a Slurm job that is not a Craton run."""

    run: str = ""
    rank: str = ""
    run_node: str = ""  # the run's name for this node
    hpc_job: str = ""


NO_OCCUPANT = Occupant()


class Occupants:
    """Map PIDs to occupants by this node's procfs."""

    def __init__(self, root: NodeRoot, here: RunsHere) -> None:
        self._root, self._here = root, here
        # PID → (start time, number of the scan it was resolved with, occupant)
        self._known: dict[int, tuple[str, int, Occupant]] = {}
        self._is_first = True

    def of(self, pid: int, now: float) -> Occupant:
        if self._is_first:
            self._here.has_looked.wait(FIRST_LOOK_SECONDS)
            self._is_first = False
        began, parent = self._stat(pid)
        look = self._here.last.number
        entry = self._known.get(pid)
        # The next scan may find the rank of an unknown process.
        if entry is not None and entry[0] == began and (entry[2].rank or entry[1] == look):
            result = entry[2]
        else:
            result = self._ask(pid, parent, now)
            if began:
                self._known[pid] = (began, look, result)
        # In a container the agent's host name may be wrong.
        if result.run and result.run_node and len(self._numbers(pid)) > 1:
            self._here.is_here(result.run, result.run_node, now)
        return result

    def forget(self, alive: Iterable[int]) -> None:
        """Keep only these processes."""
        kept = set(alive)
        self._known = {pid: entry for pid, entry in self._known.items() if pid in kept}

    def _ask(self, pid: int, parent: int, now: float) -> Occupant:
        variables = self._environment(pid)
        run, node = variables.get("CRATON_RUN", ""), variables.get("CRATON_NODE", "")
        name, job = name_by_path(Path(run)) if run else "", variables.get("SLURM_JOB_ID", "")
        rank = variables.get("RANK") or variables.get("CRATON_RANK", "")
        if run and rank.isdecimal():
            return Occupant(name, rank, node, job)
        if run:
            self._here.also(Path(run), now)
        looked = self._here.last
        # Scans stop while the file system hangs; an old PID may belong to another process by now.
        is_believed = now - looked.moment < BELIEVED_SECONDS
        depth = len(self._numbers(pid))
        ancestor, ancestors_left = pid, MAX_PARENTS if is_believed else 0
        while ancestor > 1 and ancestors_left:
            owner = looked.by_number.get(ancestor)
            if owner is None and name and node and len(numbers := self._numbers(ancestor)) == depth:
                owner = looked.ranks.get((name, node, numbers[-1]))
            if owner is not None:
                return Occupant(owner.run, owner.rank, owner.run_node, job)
            ancestor, parent = parent, self._stat(parent)[1]
            ancestors_left -= 1
        return Occupant(name, "", node, job)

    def _environment(self, pid: int) -> dict[str, str]:
        text = self._root.bytes_of(f"proc/{pid}/environ").decode("utf-8", "replace")
        return dict(pair.split("=", 1) for pair in text.split("\0") if "=" in pair)

    def _numbers(self, pid: int) -> tuple[int, ...]:
        """Return the PIDs of a process, from the host's to that of its innermost container (NSpid of proc(5), Linux 4.1
        and later)."""
        match = _NUMBERS.search(self._root.bytes_of(f"proc/{pid}/status"))
        return tuple(map(int, match[1].split())) if match else (pid,)

    def _stat(self, pid: int) -> tuple[str, int]:
        """Return start time and parent of a process: fields 22 and 4 of proc(5), counted after the name in brackets."""
        fields = self._root.bytes_of(f"proc/{pid}/stat").rpartition(b")")[2].split()
        return (fields[19].decode(), int(fields[1])) if len(fields) > 19 else ("", 0)


class GpuHolding:
    """The current occupant labels of each GPU, including the grace period of past occupants."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, Occupant]] = {}

    def labels(self, card: str, occupants: Sequence[Occupant], now: float) -> Occupant:
        shared = one_label(occupants)
        if shared != NO_OCCUPANT:
            self._last[card] = (now, shared)
            return shared
        moment, last = self._last.get(card, (0.0, NO_OCCUPANT))
        return last if not occupants and now - moment <= GRACE_SECONDS else NO_OCCUPANT


def one_label(occupants: Sequence[Occupant]) -> Occupant:
    """Return the labels that all occupants of a GPU share: a GPU's series must exist only once. Two ranks of one run
    keep the run label; two runs keep none."""
    named = [occupant for occupant in occupants if occupant != NO_OCCUPANT]
    # A helper process of a rank (its keeper, an MPS server) is not another rank.
    ranked = [ranked_one for ranked_one in named if ranked_one.rank] or named
    run, job = _common([ranked_one.run for ranked_one in ranked]), _common([element.hpc_job for element in ranked])
    if not run:
        return Occupant(hpc_job=job)  # rank 3 of two runs is not one rank
    return Occupant(run, _common([entry.rank for entry in ranked]), _common([item.run_node for item in ranked]), job)


def _common(values: Sequence[str]) -> str:
    return values[0] if values and all(value == values[0] for value in values) else ""
