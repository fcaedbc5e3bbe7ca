"""Memory of the fifth set: a small stack, forks of a large process, huge pages, storage of threads, vain restarts."""

from __future__ import annotations

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.program_injections import GO, trigger

PROGRAM = "fifth_memory"
OBJECTIVE = {"objective": f"{PROGRAM}:objective"}
COMMAND = {"command": ["{python}", f"{PROGRAM}.py"]}
PROGRESS = {"progress": {"pattern": "step {step} loss {loss}", "hang": "15m"}}
MEMORY = r"\bmemory\b|\boom\b"
NETWORK = (r"network|fabric",)
NODE_ACTIONS = (r"\bdrain\b|\breboot\b|replace the node",)
MORE_MEMORY = r"add memory|more memory|smaller batch|micro_batch"


FAULTS = (
    LiveFault(
        name="thread-with-a-small-stack",
        family="memory",
        summary="A parser of rank 1 runs in a thread with 128 KiB of stack; a nested answer overflows it: SIGSEGV.",
        source="https://github.com/ultrajson/ultrajson/issues/254",
        job=JobRecipe(
            keys={**OBJECTIVE, "layout": {"tp": 2, "micro_batch": 4}}, program=PROGRAM, fault="stack", victim=1
        ),
        expected=ExpectedVerdict(
            layers=("framework", "host"),
            conditions=("dead",),
            ranks=frozenset({1}),
            remedy=(r"SIGSEGV|segmentation|signal 11|\bstack\b|core dump|faulthandler|native|extension",),
            misleading=NETWORK,
        ),
    ),
    LiveFault(
        name="forks-of-a-large-process",
        family="memory",
        summary="The objective of rank 0 forks a scorer per sample and now holds 2 GiB, whose page tables each copies.",
        source="https://github.com/openedx/codejail/pull/235",
        job=JobRecipe(
            kind="sft",
            keys={**OBJECTIVE, "train": {"lora": {"rank": 4}}, "layout": {"replicate": 2, "micro_batch": 4}},
            program=PROGRAM,
            fault="forks",
            victim=0,
        ),
        expected=ExpectedVerdict(
            layers=("framework", "host"),
            conditions=("slow",),
            ranks=frozenset({0}),
            node="node-0",
            remedy=(
                r"fork|page tables?|system time|kernel time|child|compute|profil|py-spy|stack|objective|fifth_memory",
            ),
            misleading=(*NETWORK, *NODE_ACTIONS),
        ),
        judge_seconds=35,
    ),
    LiveFault(
        name="no-huge-pages",
        family="memory",
        summary="A script maps its buffers in huge pages, and the nodes reserve none: cannot allocate memory.",
        source="https://github.com/simongog/sdsl-lite/issues/131",
        job=JobRecipe(kind="command", keys=COMMAND, program=PROGRAM, fault="pages"),
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("dead",),
            ranks=None,
            remedy=(r"huge|Errno 12|Cannot allocate memory|ENOMEM|fifth_memory",),
            misleading=(*NETWORK, *NODE_ACTIONS),
        ),
    ),
    LiveFault(
        name="storage-of-threads-full",
        family="memory",
        summary="A library that a script loads late finds no room in the static TLS block; memory is free.",
        source="https://github.com/NVIDIA-AI-IOT/torch2trt/issues/563",
        job=JobRecipe(kind="command", keys={**COMMAND, **PROGRESS}, program=PROGRAM, fault="library"),
        expected=ExpectedVerdict(
            layers=("framework", "host"),
            conditions=("dead",),
            ranks=None,
            remedy=(r"static TLS|TLS block|LD_PRELOAD|libfused|shared (object|library)|dlopen|load_library|import",),
            misleading=(*NETWORK, *NODE_ACTIONS, MORE_MEMORY),
        ),
        needs=("cc",),
    ),
    LiveFault(
        name="killed-for-memory-at-each-start",
        family="memory",
        summary="Rank 1 loads a table above the memory limit of the container; after its restart it is killed again.",
        source="https://github.com/kubernetes/kubernetes/issues/98157",
        job=JobRecipe(
            keys={
                **OBJECTIVE,
                "layout": {"replicate": 2, "micro_batch": 4},
                "recover": {"tries": 1},
            },
            program=PROGRAM,
            fault="table",
            victim=1,
            env=GO,
            cgroups={"memory": {"memory.limit_in_bytes": "3G"}},
            settled_step=40,
        ),
        inject=trigger,
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("dead",),
            ranks=frozenset({1}),
            node="node-1",
            remedy=(MEMORY,),
            misleading=NETWORK,
        ),
        judge_seconds=60,
        needs=("root", "cgroup:memory"),
    ),
)
