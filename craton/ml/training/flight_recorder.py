"""PyTorch's flight recorder: the last collectives of this rank, written when its agent requests them.

PyTorch itself writes them only when a collective has timed out, minutes later, and then ends the process. An agent that
sees a rank stuck wants them at once, and the rank may yet continue.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

import torch
import torch._C._distributed_c10d as c10d  # the recorder has no public interface
import torch.distributed as dist


def write_recording(path: Path) -> None:
    """Replace the file by this rank's recording; without effect if there is none, or if the disk refuses it."""
    with contextlib.suppress(OSError, RuntimeError):
        if data := _recording():
            path.parent.mkdir(exist_ok=True)
            fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
            try:
                fresh.write_bytes(data)
                os.replace(fresh, path)
            except OSError:
                fresh.unlink(missing_ok=True)


def _recording() -> bytes:
    """Return the pickled recording; empty before there are process groups."""
    if not dist.is_available() or not dist.is_initialized():
        return b""
    is_on_gpu = torch.cuda.is_available() and hasattr(c10d, "_dump_nccl_trace")
    dump = c10d._dump_nccl_trace if is_on_gpu else c10d._dump_fr_trace  # type: ignore[attr-defined]
    return bytes(dump(includeCollectives=True, includeStackTraces=True, onlyActive=False))
