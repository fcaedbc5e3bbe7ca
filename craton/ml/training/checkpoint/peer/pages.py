"""Pages of shared memory: map them into this process with several threads, and page-lock them for a GPU.

A process that page-locks memory maps page after page, a third of a second per GiB, and holds a lock of the CUDA driver
meanwhile. Mapped beforehand, page-locking takes a tenth of that.
"""

from __future__ import annotations

import ctypes
import mmap
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from craton.infrastructure import usable_cores
from craton.ml.training.checkpoint.staging import local_world

MADV_POPULATE_WRITE = 23  # linux/mman.h, since Linux 5.14
MAX_THREADS = 8
PIECE_BYTES = 256 << 20


def map_pages(address: int, num_bytes: int) -> None:
    """Map these bytes, which begin at a page. Without effect where the kernel cannot do it: the pages are then mapped
    when they are used."""
    assert address % mmap.PAGESIZE == 0, address
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def populate(offset: int) -> None:
        madvise(address + offset, min(PIECE_BYTES, num_bytes - offset), MADV_POPULATE_WRITE)

    threads = max(1, min(MAX_THREADS, usable_cores() // local_world() // 2))
    with ThreadPoolExecutor(threads, thread_name_prefix="map-pages") as pool:
        list(pool.map(populate, range(0, num_bytes, PIECE_BYTES)))


def page_lock(address: int, num_bytes: int, device: torch.device) -> None:
    """Map the pages and lock them; RuntimeError if that is not possible. No thread of this process can launch kernels
    while they are locked."""
    map_pages(address, num_bytes)
    with torch.cuda.device(device):
        problem = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))
    if problem != 0:
        raise RuntimeError(f"a slot cannot be page-locked: CUDA error {problem}")


@contextmanager
def page_locked(memory: Tensor, device: torch.device) -> Iterator[None]:
    """Page-lock memory for the time of the context, if that is possible: copies from it are an order faster."""
    address = memory.data_ptr()
    try:
        page_lock(address, memory.nbytes, device)
    except RuntimeError as error:
        warnings.warn(f"{error}; the restore copies more slowly", stacklevel=3)
        yield
        return
    try:
        yield
    finally:
        torch.cuda.cudart().cudaHostUnregister(address)
