"""The batch script of a run: `sbatch_script` is pure, and its result is everything that Slurm gets.

The script only requests resources and executes `python -m craton.orchestration.slurm.batch RUN NONCE`. A value with a
special meaning to sbatch or a shell is refused, so nothing from a job file is ever interpreted. The nonce is new for
every submission and is also in the job's comment: it matches a job with its run, even if sbatch's response was lost.
Secrets are not in the script: sbatch takes them from the environment of the submitting shell.
"""

from __future__ import annotations

import math
import re
import secrets
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from craton.orchestration.errors import StartError
from craton.telemetry import RunDirectory

if TYPE_CHECKING:
    from craton.job import Job
    from craton.orchestration.draft import Draft

SCRIPT_FILE = "job.sbatch"
FOR_EVER_SECONDS = 365 * 86400.0  # without a time `--switches` waits five minutes; sites may limit it
LONGEST_SIGNAL_SECONDS = 65535  # sbatch(1), --signal
BATCH = "craton.orchestration.slurm.batch"

_NAME = r"[A-Za-z0-9][A-Za-z0-9._@+-]*"
_HOSTS = r"[A-Za-z0-9._-]+(?:\[[0-9,-]+\][A-Za-z0-9._-]*)*"
_PATTERNS = {
    "job-name": _NAME,
    "partition": rf"{_NAME}(?:,{_NAME})*",
    "account": _NAME,
    "qos": _NAME,
    "gres": r"[A-Za-z0-9_]+(?::[A-Za-z0-9_.-]+)*(?:,[A-Za-z0-9_]+(?::[A-Za-z0-9_.-]+)*)*",
    "constraint": r"[A-Za-z0-9_(\[!][A-Za-z0-9_.=,&|*!\[\]()-]*",
    "reservation": rf"{_NAME}(?:,{_NAME})*",
    "exclude": rf"{_HOSTS}(?:,{_HOSTS})*",
}
# In an output path `%` and `\` have a special meaning, and a quotation mark would end the value.
_PATH = re.compile(r"""[^\x00-\x1f\x7f"'\\%`$#]+""")
_COMMENT = re.compile(r"^#SBATCH --comment=craton:[^:\s]+:([0-9a-f]+)$", re.MULTILINE)


def new_nonce() -> str:
    return secrets.token_hex(8)


@dataclass(frozen=True)
class ScriptOptions:
    """Settings that do not come from the job: the interpreter, copies, and further sbatch options."""

    python: str = sys.executable
    copies: int = 1  # runs NAME-1 … NAME-N of the same job, as an array
    extra: dict[str, str] = field(default_factory=dict)  # more options, by name
    nonce: str = field(default_factory=new_nonce)  # of this submission


def sbatch_script(draft: Draft, run: RunDirectory, options: ScriptOptions | None = None) -> str:
    """Return the script of a run; StartError for a value that Slurm cannot take."""
    options = options or ScriptOptions()
    directives = [_directive(name, value) for name, value in directives_of(draft, run, options).items()]
    lines = ["#!/bin/sh", *directives]
    if secrets := _secrets_of(draft):
        lines.append(f"# from the environment of the submitting shell: {', '.join(secrets)}")
    command = shlex.join([options.python, "-m", BATCH])
    target = shlex.quote(str(run.path))
    if options.copies > 1:
        target = f'{shlex.quote(copies_stem(run))}-"$SLURM_ARRAY_TASK_ID"'
    return "\n".join([*lines, f"exec {command} {target} {shlex.quote(options.nonce)}", ""])


def _secrets_of(draft: Draft) -> list[str]:
    """Return the variables that the run and its members take from the submitting shell."""
    jobs = [draft.job, *(draft.members.jobs.values() if draft.members is not None else ())]
    of_servers = [key for job in jobs if job.serve for key in (job.serve.api_keys, job.serve.admin_key) if key]
    return list(dict.fromkeys([*(name for job in jobs for name in job.run.secrets), *of_servers]))


def nonce_of(script: str) -> str:
    """Return the nonce in a script; empty if there is none."""
    match = _COMMENT.search(script)
    return match[1] if match else ""


def directives_of(draft: Draft, run: RunDirectory, options: ScriptOptions) -> dict[str, str]:
    """Return option → value; an empty value is a flag."""
    job, launch = draft.job, draft.launch
    wanted, scheduler = job.run, job.cluster.file.scheduler if job.cluster.file else None
    members = [member for member in draft.members.spec.members if not member.is_kept] if draft.members else []
    gpus = max([launch.node_gpus if launch.gpus else 0, *(member.gpus for member in members)])
    cores = max([launch.node_gpus * launch.threads_per_rank, *(member.cpus for member in members)])
    folder, number = str(run.path), "%j"
    if options.copies > 1:
        folder, number = f"{copies_stem(run)}-%a", "%A"
    values: dict[str, str | None] = {
        "job-name": job.name,
        "comment": f"craton:{job.name}:{options.nonce}",
        "partition": wanted.partition or (scheduler.partition if scheduler else None),
        "account": wanted.account or (scheduler.account if scheduler else None),
        "qos": wanted.qos or (scheduler.qos if scheduler else None),
        "nodes": str(draft.scheduled_nodes),
        "ntasks-per-node": "1",
        "gres": wanted.gres or (f"gpu:{gpus}" if gpus else None),
        "exclusive": "" if wanted.exclusive else None,
        "mem": "0" if wanted.exclusive else None,
        "cpus-per-task": None if wanted.exclusive else str(cores),
        "time": None if wanted.time_limit is None else duration(wanted.time_limit),
        "signal": f"B:USR1@{signal_seconds(job)}",
        "requeue": "",
        "open-mode": "append",
        "output": f"{folder}/logs/slurm-{number}.out",
        "export": "ALL",
        "constraint": wanted.constraint,
        "reservation": wanted.reservation,
        "exclude": ",".join(wanted.exclude) or None,
        "array": f"1-{options.copies}" if options.copies > 1 else None,
        "no-kill": "" if len(launch.nodes) > launch.working_nodes or launch.min_nodes else None,
        **placement_of(draft),
        **options.extra,
    }
    return {name: _checked(job, name, value) for name, value in values.items() if value is not None}


def placement_of(draft: Draft) -> dict[str, str]:
    """Return `--switches` for a tree topology, `--segment` for blocks; empty without a constraint."""
    job, num_nodes = draft.job, draft.scheduled_nodes
    if job.placement is None or num_nodes == 1 or job.placement.within == "zone":
        return {}
    within, where = job.placement.within, job.where("placement", "within")
    if within == "node":
        raise StartError(f"{where}{num_nodes} nodes cannot be within one node; write e.g. `within: leaf`")
    file = job.cluster.file
    block = file.scheduler.block_nodes if file and file.scheduler else None
    leaf = file.levels.leaf.nodes if file and file.levels.leaf else None
    size = block or leaf
    if within == "leaf" and size and num_nodes > size:
        raise StartError(
            f"{where}{num_nodes} nodes do not fit on one leaf, which has {size}; write `within: spine`, or use fewer "
            "nodes or spares"
        )
    if block:
        segment = num_nodes if within == "leaf" else next(n for n in range(block, 0, -1) if num_nodes % n == 0)
        return {"segment": str(segment)}
    if within == "spine" and not leaf:
        raise StartError(
            f"{where}the size of a leaf is unknown; add `levels: {{leaf: {{nodes: N}}}}` to the cluster file"
        )
    leaves = 1 if within == "leaf" else math.ceil(num_nodes / (leaf or num_nodes))
    wait = FOR_EVER_SECONDS if job.placement.wait is None else job.placement.wait
    return {"switches": f"{leaves}@{duration(wait)}"}


def signal_seconds(job: Job) -> int:
    """Return how long before its time limit the job gets the signal; at most half of the limit."""
    limit = job.run.time_limit
    seconds = job.run.save_before if limit is None else min(job.run.save_before, limit / 2)
    return max(1, min(LONGEST_SIGNAL_SECONDS, int(seconds)))


def duration(seconds: float) -> str:
    """Format as `1-02:03:00`: days, hours, whole minutes, rounded up."""
    minutes = max(1, math.ceil(seconds / 60))
    return f"{minutes // 1440}-{minutes // 60 % 24:02d}:{minutes % 60:02d}:00"


def copies_stem(run: RunDirectory) -> str:
    """Return `/runs/NAME` for the run NAME-1."""
    return re.sub(r"-1$", "", str(run.path))


def checked_path(path: Path | str) -> str:
    """Return a path that sbatch takes literally; StartError for any other."""
    text = str(path)
    if not _PATH.fullmatch(text):
        raise StartError(
            f"Slurm cannot use the path {text!r}: quotation marks, backslashes, line breaks and % $ # ` have a special "
            "meaning; set CRATON_RUNS to another folder"
        )
    return text


def _checked(job: Job, name: str, value: str) -> str:
    if name == "output":
        checked_path(value.replace("%a", "").replace("%A", "").replace("%j", ""))
        return value
    pattern = _PATTERNS.get(name)
    if pattern is not None and not re.fullmatch(pattern, value):
        key = "name" if name == "job-name" else f"run.{name}"
        raise StartError(
            f"{job.where(*key.split('.'))}{key} {value!r} is not valid for Slurm; use letters, digits and . _ - as "
            "`scontrol show` prints them"
        )
    assert "\n" not in value, f"{name} would begin a new line"
    return value


def _directive(name: str, value: str) -> str:
    """Return a directive line; sbatch splits it at blanks and honours quotation marks."""
    plain = re.fullmatch(r"[A-Za-z0-9_.,:=@%/+-]*", value) is not None
    shown = value if plain else f'"{value}"'
    return f"#SBATCH --{name}" + (f"={shown}" if value else "")
