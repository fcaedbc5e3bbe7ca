"""PyTorch's flight recorder: the last collectives of this rank, written when its agent requests them.

PyTorch itself writes them only when a collective has timed out, minutes later, and then ends the process. An agent that
sees a rank stuck wants them at once, and the rank may yet continue.

The recorder outlives the generations of a rank, whose process groups have the same names and count from 1 again. So
only collectives of the current generation are written (`begin_recording`), with the members of every group: on NCCL,
PyTorch 2.11 knows those of the first default group of a process but not of later ones, and on gloo 2.13 knows none.
"""

from __future__ import annotations

import contextlib
import json
import pickle
from pathlib import Path
from typing import Any

import torch
import torch._C._distributed_c10d as c10d  # the recorder has no public interface
import torch.distributed as dist

from craton.telemetry.files import replace_bytes

_first_record = 0  # number of the first collective of the current generation


def begin_recording() -> None:
    """Leave out all collectives before this call; call it before the process groups of a generation are created."""
    global _first_record
    _first_record = 0
    if not dist.is_available():
        return
    with contextlib.suppress(Exception):  # whatever torch raises, the rank can train without a recording
        if _is_on_gpu():
            # Without a dump: it would query the events of collectives that were aborted, which may be gone.
            getattr(c10d, "_reset_fr_recording_nccl", _nothing)()
        else:
            _first_record = 1 + max((entry["record_id"] for entry in _read(stacks=False)["entries"]), default=-1)


def write_recording(path: Path) -> None:
    """Replace the file by this rank's recording; without effect if there is none, or if the disk refuses it."""
    with contextlib.suppress(Exception):  # whatever torch raises, there is no recording then
        if data := _recording():
            path.parent.mkdir(exist_ok=True)
            replace_bytes(path, data, durable=False)


def _recording() -> bytes:
    """Return the pickled recording; empty before there are process groups."""
    if not dist.is_available() or not dist.is_initialized():
        return b""
    recording = _read(stacks=True)
    recording["entries"] = [entry for entry in recording["entries"] if entry["record_id"] >= _first_record]
    recording["pg_config"] = {**recording["pg_config"], **_groups()}
    return pickle.dumps(recording)


def _read(stacks: bool) -> dict[str, Any]:
    dump = c10d._dump_nccl_trace if _is_on_gpu() else c10d._dump_fr_trace  # type: ignore[attr-defined]
    data = dump(includeCollectives=True, includeStackTraces=stacks, onlyActive=False)
    recording: dict[str, Any] = pickle.loads(data)  # written by this process
    return {**recording, "entries": list(recording.get("entries") or ()), "pg_config": recording.get("pg_config") or {}}


def _groups() -> dict[str, dict[str, str]]:
    """Return name → name, description and members of every process group, as PyTorch writes them."""
    world = dist.distributed_c10d._world
    found: dict[str, dict[str, str]] = {}
    with contextlib.suppress(RuntimeError):  # the rank itself may be creating one
        for group, name in world.pg_names.items():
            ranks = json.dumps(sorted(world.pg_group_ranks.get(group, ())))
            found[name] = {"name": name, "desc": group.group_desc, "ranks": ranks}
    return found


def _nothing() -> None:
    """Older versions of PyTorch cannot forget collectives."""


def _is_on_gpu() -> bool:
    return torch.cuda.is_available() and hasattr(c10d, "_dump_nccl_trace")
