"""Memory of the second set: files in memory, killed workers, waiting at a limit, mappings, open files, page cache."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.program_injections import GO, children_of, disable_oom_killer, limit_memory, trigger
from craton.bench.why.faults.running import RunningJob

DATA = {"path": None, "tokenizer": None, "source": "second_memory:samples"}
MEMORY = r"\bmemory\b|\boom\b"
NEEDS = ("root", "cgroup:memory")
MORE_OPEN_FILES = 48
PAGES_MEGABYTES = 256
CACHE_MEGABYTES = 48


def fill_shared_memory(job: RunningJob) -> None:
    limit_memory(job, [job.pid(1)], 400)
    trigger(job)


def let_the_worker_leak(job: RunningJob) -> None:
    """Limit rank 1 and its worker together; the worker then grows until the kernel kills it."""
    pid = job.pid(1)
    limit_memory(job, [pid, *children_of(pid)], 1200)
    trigger(job)


def leak_without_oom_killer(job: RunningJob) -> None:
    disable_oom_killer(job, limit_memory(job, [job.pid(1)], 300))
    trigger(job)


def lower_the_limit_of_open_files(job: RunningJob) -> None:
    """Leave rank 1 a few more descriptors than it has, as a low `ulimit -n` does."""
    pid = job.pid(1)
    limit = len(os.listdir(f"/proc/{pid}/fd")) + MORE_OPEN_FILES
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, limit))


def make_log_folder(job: RunningJob) -> None:
    (job.folder.parent / "metrics").mkdir()


def write_pages(job: RunningJob) -> None:
    folder = job.folder.parent / "pages"
    folder.mkdir()
    megabyte = os.urandom(1 << 20)
    for rank in range(2):
        with (folder / f"rank-{rank}.bin").open("wb") as file:
            for _ in range(PAGES_MEGABYTES):
                file.write(megabyte)
            os.fsync(file.fileno())


def take_the_page_cache(job: RunningJob) -> None:
    """Limit the memory of rank 1 so far that its data no longer fits into the page cache, and drop what is there."""
    limit_memory(job, [job.pid(1)], CACHE_MEGABYTES)
    _drop_from_cache(job.folder.parent / "pages" / "rank-1.bin")


def _drop_from_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


FAULTS = (
    LiveFault(
        name="files-in-shared-memory-oom",
        family="memory",
        summary="Rank 1 fills a file in /dev/shm, which counts against its container's memory limit: it is killed.",
        source="https://github.com/kubernetes/kubernetes/issues/128339",
        job=JobRecipe(
            keys={"data": DATA, "layout": {"fsdp": 2, "micro_batch": 4}},
            program="second_memory",
            fault="shared-memory",
            victim=1,
            env=GO,
        ),
        inject=fill_shared_memory,
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("dead",),
            ranks=frozenset({1}),
            remedy=(MEMORY, r"/dev/shm|tmpfs"),
        ),
        judge_seconds=30,
        needs=NEEDS,
    ),
    LiveFault(
        name="loader-worker-oom-kill",
        family="memory",
        summary="A DataLoader worker of rank 1 grows to the memory limit; the kernel kills it, and the rank raises.",
        source="https://github.com/pytorch/pytorch/issues/8976",
        job=JobRecipe(
            kind="command",
            keys={
                "command": ["{python}", "second_memory.py"],
                "progress": {"pattern": "step {step} loss {loss}", "hang": "15m"},  # rank 1 notices after 5 s
            },
            program="second_memory",
            fault="worker",
            victim=1,
            env=GO,
        ),
        inject=let_the_worker_leak,
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("dead",),
            ranks=frozenset({1}),
            remedy=(MEMORY, r"DataLoader worker.*[Kk]illed"),
            misleading=(r"network|fabric",),
        ),
        judge_seconds=30,
        needs=NEEDS,
    ),
    LiveFault(
        name="waits-at-the-memory-limit",
        family="memory",
        summary="The container of rank 1 has no OOM killer: at its memory limit rank 1 waits in the kernel forever.",
        source="https://github.com/moby/moby/issues/15204",
        job=JobRecipe(
            keys={"data": DATA, "layout": {"replicate": 2, "micro_batch": 4}},
            program="second_memory",
            fault="waits",
            victim=1,
            env=GO,
        ),
        inject=leak_without_oom_killer,
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("hung", "dead"),
            ranks=frozenset({1}),
            remedy=(MEMORY,),
            misleading=(r"network|fabric",),
        ),
        judge_seconds=30,
        needs=NEEDS,
    ),
    LiveFault(
        name="too-many-mappings",
        family="memory",
        summary="Rank 0 maps more files into memory than vm.max_map_count allows: cannot allocate memory.",
        source="https://github.com/huggingface/datasets/issues/6790",
        job=JobRecipe(
            keys={"data": DATA, "layout": {"fsdp": 2, "micro_batch": 4}},
            program="second_memory",
            fault="maps",
            victim=0,
        ),
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("dead",),
            ranks=frozenset({0}),
            remedy=(r"max_map_count|cannot allocate memory|Errno 12|mmap|mapping",),
            misleading=(r"network|fabric",),
        ),
    ),
    LiveFault(
        name="too-many-open-files",
        family="memory",
        summary="The objective of a fine-tuning leaves a log file open in every step; rank 1 reaches its `ulimit -n`.",
        source="https://github.com/MhLiao/MaskTextSpotterV3/issues/51",
        job=JobRecipe(
            kind="sft",
            keys={"objective": "second_memory:objective", "layout": {"fsdp": 2, "micro_batch": 4}},
            program="second_memory",
            fault="files",
            victim=1,
            env={"LOGS": "{folder}/metrics"},
            prepare=make_log_folder,
        ),
        inject=lower_the_limit_of_open_files,
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("dead",),
            ranks=frozenset({1}),
            remedy=(r"too many open files|Errno 24|ulimit -n|open files|file descriptor|nofile",),
            misleading=(r"network|fabric",),
        ),
        judge_seconds=30,
        needs=("root",),
    ),
    LiveFault(
        name="no-room-for-page-cache",
        family="memory",
        summary="The memory limit of rank 1 leaves no room for the page cache: every page of its data comes from disk.",
        source="https://github.com/BVLC/caffe/issues/1377",
        job=JobRecipe(
            keys={"data": DATA, "layout": {"fsdp": 2, "micro_batch": 4}},
            program="second_memory",
            fault="cache",
            victim=1,
            env={"PAGES": "{folder}/pages"},
            prepare=write_pages,
            settled_step=60,
        ),
        inject=take_the_page_cache,
        expected=ExpectedVerdict(
            layers=("host", "storage"),
            conditions=("slow",),
            ranks=frozenset({1}),
            remedy=(MEMORY, r"page cache|\bdisk\b|reads?\b.*\b(MB|kB|GB|bytes)"),
            misleading=(r"network|fabric",),
        ),
        judge_seconds=30,
        needs=NEEDS,
    ),
)
