"""Memory of the fourth set: a gathered state, helpers that stay, an old segment, watchers, pages mapped again."""

from __future__ import annotations

from pathlib import Path

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.program_injections import GO, children_of, limit_memory, trigger
from craton.bench.why.faults.running import RunningJob

PROGRAM = "fourth_memory"
OBJECTIVE = {"objective": f"{PROGRAM}:objective"}
PROGRESS = {"progress": {"pattern": "step {step} loss {loss}", "hang": "15m"}}
MEMORY = r"\bmemory\b|\boom\b"
NEEDS = ("root", "cgroup:memory")
NETWORK = (r"network|fabric",)
NODE_ACTIONS = (r"\bdrain\b|\breboot\b|replace the node",)
WATCHERS = 12
# A start script that passes on the exit code of the training.
START_SCRIPT = '{python} fourth_memory.py; code=$?; echo "the training ended with code $code"; exit $code'
FEW_WATCHERS = f'echo {WATCHERS} > /proc/sys/user/max_inotify_instances && exec "$@"'


def let_rank_0_gather(job: RunningJob) -> None:
    pid = job.pid(0)
    limit_memory(job, [pid, *children_of(pid)], 250)
    trigger(job)


def let_helpers_stay(job: RunningJob) -> None:
    """Limit rank 1 and all helpers that it starts from now on together."""
    limit_memory(job, [job.pid(1)], 600)
    trigger(job)


def leave_segment(job: RunningJob) -> None:
    """Leave a segment of shared memory behind, as an earlier run that was killed does."""
    name = f"{job.name}-samples"
    (job.folder / "segment.txt").write_text(name)
    segment = Path("/dev/shm", name)
    segment.write_bytes(bytes(4096))
    job.undo.callback(segment.unlink, missing_ok=True)


FAULTS = (
    LiveFault(
        name="state-gathered-on-rank-0",
        family="memory",
        summary="For a save rank 0 gathers the whole state above its memory limit; its start script exits with 137.",
        source="https://github.com/facebookresearch/fairscale/issues/844",
        job=JobRecipe(
            kind="command",
            keys={"command": ["/bin/bash", "-c", START_SCRIPT], **PROGRESS},
            program=PROGRAM,
            fault="gathers",
            victim=0,
            env=GO,
            settled_step=40,
        ),
        inject=let_rank_0_gather,
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("dead",),
            ranks=frozenset({0}),
            remedy=(MEMORY,),
            misleading=NETWORK,
        ),
        judge_seconds=25,
        needs=NEEDS,
    ),
    LiveFault(
        name="helpers-pile-up",
        family="memory",
        summary="The objective of rank 1 starts helper after helper and ends none; for their memory rank 1 is killed.",
        source="https://github.com/NVIDIA/sentiment-discovery/issues/60",
        job=JobRecipe(
            keys={**OBJECTIVE, "layout": {"replicate": 2, "micro_batch": 4}},
            program=PROGRAM,
            fault="helpers",
            victim=1,
            env=GO,
            settled_step=40,
        ),
        inject=let_helpers_stay,
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("dead",),
            ranks=frozenset({1}),
            remedy=(MEMORY,),
            misleading=NETWORK,
        ),
        judge_seconds=35,
        needs=NEEDS,
    ),
    LiveFault(
        name="segment-of-killed-run",
        family="memory",
        summary="A killed run left its segment of shared memory behind; rank 0 cannot create one of the same name.",
        source="https://github.com/mosaicml/streaming/pull/813",
        job=JobRecipe(
            kind="command",
            keys={"command": ["{python}", f"{PROGRAM}.py"], **PROGRESS},
            program=PROGRAM,
            fault="segment",
            prepare=leave_segment,
        ),
        expected=ExpectedVerdict(
            layers=("framework", "host"),
            conditions=("dead",),
            ranks=frozenset({0}),
            remedy=(r"FileExists|Errno 17|File exists|already exists|left (over|behind)|stale|/dev/shm|shared memory",),
            misleading=(*NETWORK, *NODE_ACTIONS, r"add memory|more memory"),
        ),
    ),
    LiveFault(
        name="watchers-used-up",
        family="memory",
        summary="A script starts watchers of a folder until the user has no inotify instance left: error 24.",
        source="https://github.com/python-cachier/cachier/issues/24",
        job=JobRecipe(
            kind="command",
            nodes=1,
            keys={
                "command": [
                    *("unshare", "--user", "--map-root-user", "/bin/sh", "-c", FEW_WATCHERS, "sh"),
                    *("{python}", f"{PROGRAM}.py"),
                ],
                **PROGRESS,
            },
            program=PROGRAM,
            fault="watches",
        ),
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("dead",),
            ranks=frozenset({0}),
            remedy=(r"inotify|max_user_instances|Errno 24",),
            misleading=(*NETWORK, *NODE_ACTIONS, r"add memory|more memory"),
        ),
        needs=("root", "unshare"),
    ),
    LiveFault(
        name="pages-mapped-in-every-step",
        family="memory",
        summary="The objective of each rank maps and returns 512 MB in every step; page faults take most of the time.",
        source="https://github.com/tensorflow/tensorflow/issues/9757",
        job=JobRecipe(
            kind="sft",
            keys={**OBJECTIVE, "layout": {"fsdp": 2, "micro_batch": 4}},
            program=PROGRAM,
            fault="mapping",
        ),
        expected=ExpectedVerdict(
            layers=("framework", "host"),
            conditions=("slow",),
            ranks=frozenset(),
            remedy=(r"page fault|system time|malloc|allocat|mmap|compute|profil|py-spy|stack|objective|fourth_memory",),
            misleading=(*NETWORK, *NODE_ACTIONS),
        ),
        judge_seconds=35,
    ),
)
