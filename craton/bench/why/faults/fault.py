"""A live fault as plain data: which job runs, how it breaks, and which diagnosis an engineer on call would want.

The expected answer of a fault is written before `craton why` is run on it, and is never adjusted to its output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from craton.bench.why.faults.running import RunningJob

Kind = Literal["pretrain", "sft", "command", "serve"]
Onset = Literal["inject", "program", "start"]


@dataclass(frozen=True)
class ExpectedVerdict:
    """The right diagnosis. Several layers or conditions may be defensible; at most two layers."""

    layers: tuple[str, ...]
    conditions: tuple[str, ...]
    # The victim is right if the verdict names one of `ranks`, or `node` without a rank. An empty set without a node:
    # the verdict must name neither. None without a node: the victim is not judged.
    ranks: frozenset[int] | None = None
    node: str | None = None
    # Regular expressions, case-insensitive. A remedy is useful if one of `remedy` matches the sentence, the reason, the
    # action or the evidence, and none of `misleading` matches the action.
    remedy: tuple[str, ...] = ()
    misleading: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobRecipe:
    """A job, as differences to the tiny job of its kind (`environment.TINY`)."""

    kind: Kind = "pretrain"
    nodes: int = 2  # `cluster: local x N`, one rank on each; a server has one
    keys: Mapping[str, object] = field(default_factory=dict)  # merged into the job file; a None removes a key
    program: str = ""  # a file of programs/, copied beside the job file: user modules, or the script of a command
    fault: str = ""  # FAULT of the program
    victim: int | None = None  # VICTIM of the program, a rank; None: all ranks
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)  # more files beside the job file: name → text
    on: Literal["local", "slurm"] = "local"
    wrap: tuple[str, ...] = ()  # before `craton run`, such as ("prlimit", "--nofile=64"); it must exec its arguments
    # A tmpfs of its own: role → mount options, such as {"run": "size=16m"}. Roles: run (the run directory), data (the
    # folder of corpus.txt), checkpoint (the job file may name it as `{checkpoint}`).
    mounts: Mapping[str, str] = field(default_factory=dict)
    # A cgroup (v1) of its own: controller → file → value, such as {"memory": {"memory.limit_in_bytes": "1G"}}.
    cgroups: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    network: bool = False  # in a network namespace of its own, with loopback up
    prepare: Callable[[RunningJob], None] | None = None  # before `craton run`, such as draining a node of Slurm
    settled_step: int = 20  # after which the job counts as settled; commands without steps: after SETTLED_SECONDS


@dataclass(frozen=True)
class LiveFault:
    """One fault of one real run."""

    name: str
    family: str
    summary: str  # what breaks, in one sentence
    source: str  # URL of the public issue or report that it is modelled on
    job: JobRecipe
    expected: ExpectedVerdict
    # From outside, once the job has settled; the fault begins when it is called. With onset `start` it is called when
    # `craton run` has returned. None: the job breaks by itself.
    inject: Callable[[RunningJob], None] | None = None
    onset: Onset | None = None  # None: `inject` if there is one, else `program` (it touches the file $ONSET)
    judge_seconds: float = 20.0  # after the onset; a run that ended before is judged `ENDED_SECONDS` after its end
    needs: tuple[str, ...] = ()  # of `environment.missing`; without one of them the fault is listed as not run
    is_alone: bool = False  # no other run beside it: it loads the whole machine

    @property
    def begins_by(self) -> Onset:
        return self.onset or ("inject" if self.inject is not None else "program")
