"""Whose a GPU is: the processes on it, and of which rank of which run they are.

A process says it itself, in its environment (CRATON_RUN, RANK; SLURM_JOB_ID). A rank that was forked does not have its
number there, and another user's environment may not be read; then the status files of the runs on this node tell, by
process number, also for the children of a rank. In a container these are the container's numbers, so there a process
must say itself of which run and node it is. Status files are read elsewhere (`RunsHere.look`): here nothing but this
node's own procfs is opened, so that a shared file system that hangs takes no GPU's series away.

Labels outlive a process by GRACE_SECONDS while nobody else comes: a card whose error ends its job must count that error
under the job's labels, or the increase falls between two series and no rule sees it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from craton.infrastructure.probes import NodeRoot
from craton.observability.exporter.runs_here import RunsHere

GRACE_SECONDS = 60.0
FIRST_LOOK_SECONDS = 1.0  # for which the first question waits, so that series begin with their labels
BELIEVED_SECONDS = 600.0  # for which a process number is taken for the rank that a look found it to be
MAX_PARENTS = 16
_NUMBERS = re.compile(rb"^NSpid:\t([\d\t]+)$", re.MULTILINE)


@dataclass(frozen=True)
class Occupant:
    """One rank of a run, or a job of Slurm's that is no run of ours."""

    run: str = ""
    rank: str = ""
    run_node: str = ""  # what the run calls this node
    hpc_job: str = ""


NOBODY = Occupant()


class Occupants:
    """Process numbers to occupants, from this node's files."""

    def __init__(self, root: NodeRoot, here: RunsHere) -> None:
        self._root, self._here = root, here
        # process → (when it began, the look that its answer rests on, whose it is)
        self._known: dict[int, tuple[str, int, Occupant]] = {}
        self._is_first = True

    def of(self, pid: int, now: float) -> Occupant:
        if self._is_first:
            self._here.has_looked.wait(FIRST_LOOK_SECONDS)
            self._is_first = False
        began, parent = self._stat(pid)
        look = self._here.last.number
        entry = self._known.get(pid)
        # A process of no known rank may be told by the next look.
        if entry is not None and entry[0] == began and (entry[2].rank or entry[1] == look):
            result = entry[2]
        else:
            result = self._ask(pid, parent, now)
            if began:
                self._known[pid] = (began, look, result)
        if result.run and result.run_node and len(self._numbers(pid)) > 1:  # elsewhere its agent tells its host right
            self._here.is_here(result.run, result.run_node, now)
        return result

    def forget(self, alive: Iterable[int]) -> None:
        """Keeps only these processes."""
        kept = set(alive)
        self._known = {pid: entry for pid, entry in self._known.items() if pid in kept}

    def _ask(self, pid: int, parent: int, now: float) -> Occupant:
        variables = self._environment(pid)
        run, node = variables.get("CRATON_RUN", ""), variables.get("CRATON_NODE", "")
        name, job = Path(run).name if run else "", variables.get("SLURM_JOB_ID", "")
        rank = variables.get("RANK") or variables.get("CRATON_RANK", "")
        if run and rank.isdecimal():
            return Occupant(name, rank, node, job)
        if run:
            self._here.also(Path(run), now)
        looked = self._here.last
        # Looks end when the file system hangs; a number from long ago may have been given to another process since.
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
        """What a process is called, by this host first and last by the innermost container it is in (NSpid of proc(5),
        Linux 4.1 and later)."""
        match = _NUMBERS.search(self._root.bytes_of(f"proc/{pid}/status"))
        return tuple(map(int, match[1].split())) if match else (pid,)

    def _stat(self, pid: int) -> tuple[str, int]:
        """When a process began, and its parent: fields 22 and 4 of proc(5), counted behind the name in brackets."""
        fields = self._root.bytes_of(f"proc/{pid}/stat").rpartition(b")")[2].split()
        return (fields[19].decode(), int(fields[1])) if len(fields) > 19 else ("", 0)


class GpuHolding:
    """Which labels each card has now, with the grace of those that were there before."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, Occupant]] = {}

    def labels(self, card: str, occupants: Sequence[Occupant], now: float) -> Occupant:
        shared = one_label(occupants)
        if shared != NOBODY:
            self._last[card] = (now, shared)
            return shared
        moment, last = self._last.get(card, (0.0, NOBODY))
        return last if not occupants and now - moment <= GRACE_SECONDS else NOBODY


def one_label(occupants: Sequence[Occupant]) -> Occupant:
    """What all occupants of a card have in common: a series has one value of a label, and a card's series must not be
    served twice. Two ranks of a run leave the run, two runs nothing."""
    named = [occupant for occupant in occupants if occupant != NOBODY]
    # A helper of a rank (its keeper, a server of MPS) is not another rank.
    ranked = [ranked_one for ranked_one in named if ranked_one.rank] or named
    run, job = _common([ranked_one.run for ranked_one in ranked]), _common([element.hpc_job for element in ranked])
    if not run:
        return Occupant(hpc_job=job)  # rank 3 of two runs is not one rank
    return Occupant(run, _common([entry.rank for entry in ranked]), _common([item.run_node for item in ranked]), job)


def _common(values: Sequence[str]) -> str:
    return values[0] if values and all(value == values[0] for value in values) else ""
