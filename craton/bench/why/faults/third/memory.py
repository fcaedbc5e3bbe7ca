"""Memory of the third set: swapping, semaphores, locked memory, one huge allocation, a helper killed for memory."""

from __future__ import annotations

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.program_injections import GO, child_of, limit_memory, trigger
from craton.bench.why.faults.running import RunningJob
from craton.bench.why.faults.third.system_injections import add_swap

DATA = {"path": None, "tokenizer": None, "source": "third_memory:samples"}
MEMORY = r"\bmemory\b|\boom\b"
NEEDS = ("root", "cgroup:memory")
NETWORK = (r"network|fabric",)
SEMAPHORES = 96
# System V semaphores of a node: an IPC namespace with room for so many sets.
FEW_SEMAPHORES = (
    *("unshare", "--ipc", "/bin/sh", "-c"),
    f'echo 32000 1024000000 500 {SEMAPHORES} > /proc/sys/kernel/sem && exec "$@"',
    "sh",
)
LOCKED_BYTES = 2_000_000


def let_rank_swap(job: RunningJob) -> None:
    """Limit rank 1 to less than half of the table that it loads next; the rest goes to a swap file."""
    add_swap(job)
    limit_memory(job, [job.pid(1)], 160)
    trigger(job)


def let_tokenizer_leak(job: RunningJob) -> None:
    limit_memory(job, [child_of(job.pid(0), "tokenize")], 120)
    trigger(job)


FAULTS = (
    LiveFault(
        name="rank-swaps",
        family="memory",
        summary="The memory limit of rank 1 is below the size of the table that it loads; the kernel swaps pages.",
        source="https://github.com/apptainer/singularity/issues/5041",
        job=JobRecipe(
            keys={"data": DATA, "layout": {"replicate": 2, "micro_batch": 4}},
            program="third_memory",
            fault="swap",
            victim=1,
            env=GO,
            settled_step=60,
        ),
        inject=let_rank_swap,
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("slow", "hung"),
            ranks=frozenset({1}),
            node="node-1",
            remedy=(MEMORY, r"\bswap"),
            misleading=NETWORK,
        ),
        judge_seconds=35,
        needs=(*NEEDS, "swapon", "mkswap"),
    ),
    LiveFault(
        name="semaphores-used-up",
        family="memory",
        summary="A library of rank 1 leaks System V semaphores until the node has none: no space left on device.",
        source="https://github.com/ibis-project/ibis/issues/12",
        job=JobRecipe(
            keys={"data": DATA, "layout": {"fsdp": 2, "micro_batch": 4}},
            program="third_memory",
            fault="semaphores",
            victim=1,
            wrap=FEW_SEMAPHORES,
        ),
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("dead",),
            ranks=frozenset({1}),
            remedy=(r"semget|semaphore|\bipcs\b|\bipcrm\b|kernel\.sem|third_memory",),
            misleading=(*NETWORK, r"delete|(free|more) (disk )?space|larger disk|disk is full|\bdf\b"),
        ),
        needs=("root", "unshare"),
    ),
    LiveFault(
        name="locked-memory-limit",
        family="memory",
        summary="A script registers more buffers than `ulimit -l` allows to lock: cannot allocate memory.",
        source="https://github.com/NVIDIA/nccl-tests/issues/206",
        job=JobRecipe(
            kind="command",
            keys={
                "command": [
                    *("prlimit", f"--memlock={LOCKED_BYTES}", "setpriv", "--bounding-set=-ipc_lock"),
                    *("{python}", "third_memory.py"),
                ],
                "progress": {"pattern": "step {step} loss {loss}", "hang": "10x"},
            },
            program="third_memory",
            fault="locked",
        ),
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("dead",),
            ranks=None,
            remedy=(r"mlock|memlock|ulimit -l|locked memory|cannot allocate memory|Errno 12|register a buffer",),
            misleading=(*NETWORK, r"drain|replace the node"),
        ),
        needs=("root", "prlimit", "setpriv"),
    ),
    LiveFault(
        name="one-document-too-long",
        family="memory",
        summary="For one long document the objective of rank 1 asks for a matrix of 16 TB, which the kernel refuses.",
        source="https://github.com/mxfold/mxfold2/issues/20",
        job=JobRecipe(
            kind="sft",
            keys={
                "objective": "third_memory:objective",
                "train": {"lora": {"rank": 4}},
                "layout": {"fsdp": 2, "micro_batch": 4},
            },
            program="third_memory",
            fault="long",
            victim=1,
        ),
        expected=ExpectedVerdict(
            layers=("framework", "host"),
            conditions=("dead",),
            ranks=frozenset({1}),
            remedy=(MEMORY, r"allocate|MemoryError|third_memory|objective|length"),
            misleading=(*NETWORK, r"drain|replace the node"),
        ),
    ),
    LiveFault(
        name="tokenizer-process-oom-kill",
        family="memory",
        summary="The tokenizer process of rank 0 grows to its memory limit; the kernel kills it, and rank 0 raises.",
        source="https://github.com/blue-yonder/tsfresh/issues/987",
        job=JobRecipe(
            keys={"data": DATA, "layout": {"tp": 2, "micro_batch": 4}},
            program="third_memory",
            fault="helper",
            env=GO,
            settled_step=40,
        ),
        inject=let_tokenizer_leak,
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("dead",),
            ranks=frozenset({0}),
            remedy=(MEMORY,),
            misleading=NETWORK,
        ),
        judge_seconds=30,
        needs=NEEDS,
    ),
)
