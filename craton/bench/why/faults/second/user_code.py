"""User code of the second set: deadlocks, debuggers, native crashes, ranks that leave the common path, slow rewards."""

from __future__ import annotations

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.program_injections import SERVICE_PORT, service_folder, start_service
from craton.bench.why.faults.running import RunningJob

OBJECTIVE = {"objective": "second_user_code:objective"}
SCRIPT = {
    "command": ["{python}", "second_user_code.py"],
    "progress": {"pattern": "step {step} loss {loss}", "hang": "15m"},
}
MOE = {"experts": 4, "top_k": 2, "moe_ffn_hidden": 64}
REWARD_SECONDS = "0.8"
NODE_ACTIONS = (r"drain|reboot|replace the node|add memory",)


def slow_down_the_reward_server(job: RunningJob) -> None:
    (service_folder(job) / "seconds").write_text(REWARD_SECONDS)


FAULTS = (
    LiveFault(
        name="handler-deadlocks",
        family="user_code",
        summary="A SIGCHLD handler in the objective of rank 0 takes a lock that the interrupted code of rank 0 holds.",
        source="https://github.com/Delgan/loguru/issues/390",
        job=JobRecipe(
            kind="sft",
            keys={**OBJECTIVE, "layout": {"fsdp": 2, "micro_batch": 4}},
            program="second_user_code",
            fault="handler",
            victim=0,
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("hung", "dead"),
            ranks=frozenset({0}),
            remedy=(r"py-spy|stack|second_user_code|on_child|lock|objective",),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="rank-skips-a-batch",
        family="user_code",
        summary="Rank 1 of three finds its batch empty, skips its backward pass and waits in a barrier.",
        source="https://github.com/NVIDIA-NeMo/Automodel/pull/2468",
        job=JobRecipe(kind="command", nodes=3, keys=SCRIPT, program="second_user_code", fault="skips", victim=1),
        expected=ExpectedVerdict(
            layers=("framework", "collective"),
            conditions=("hung", "dead"),
            ranks=frozenset({1}),
            remedy=(
                r"skipping it|no valid anchors|barrier",
                r"(different|another|other|same) collective|out of step|desync|mismatch",
                r"py-spy|stack|second_user_code",
            ),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="breakpoint-left-in-model",
        family="user_code",
        summary="Rank 1 reaches a forgotten breakpoint() in a custom model; without a terminal the debugger quits.",
        source="https://github.com/ljanyst/ssd-tensorflow/issues/9",
        job=JobRecipe(
            keys={"model": "second_user_code:build", "layout": {"replicate": 2, "micro_batch": 4}},
            program="second_user_code",
            victim=1,
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("dead", "hung"),
            ranks=frozenset({1}),
            remedy=(r"BdbQuit|breakpoint|\bpdb\b|debugger|second_user_code",),
            misleading=NODE_ACTIONS,
        ),
    ),
    LiveFault(
        name="extension-corrupts-heap",
        family="user_code",
        summary="A native extension in the objective of a LoRA fine-tuning frees a wrong pointer; rank 0 aborts.",
        source="https://github.com/isl-org/Open3D-PointNet2-Semantic3D/issues/66",
        job=JobRecipe(
            kind="sft",
            keys={**OBJECTIVE, "train": {"lora": {"rank": 4}}, "layout": {"fsdp": 2, "micro_batch": 4}},
            program="second_user_code",
            fault="heap",
            victim=0,
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("dead",),
            ranks=frozenset({0}),
            remedy=(r"SIGABRT|signal 6|\babort|free\(\)|invalid pointer|native|extension|core dump",),
            misleading=NODE_ACTIONS,
        ),
    ),
    LiveFault(
        name="rank-takes-another-branch",
        family="user_code",
        summary="A batch of rank 1 uses only one of two heads; DDP on rank 1 finds that its reduction did not finish.",
        source="https://github.com/open-mmlab/mmdetection/pull/4742",
        job=JobRecipe(kind="command", keys=SCRIPT, program="second_user_code", fault="branch", victim=1),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("dead",),
            ranks=frozenset({1}),
            remedy=(
                r"Expected to have finished reduction|unused[ _]param|not used in producing loss|second_user_code",
            ),
            misleading=(*NODE_ACTIONS, r"network"),
        ),
    ),
    LiveFault(
        name="reward-server-slow",
        family="user_code",
        summary="The reward server that the objective of every rank asks in each step takes 0.8 s instead of 1 ms.",
        source="https://github.com/verl-project/verl/pull/2854",
        job=JobRecipe(
            keys={**OBJECTIVE, "model": MOE, "layout": {"fsdp": 2, "ep": 2, "micro_batch": 4}},
            program="second_user_code",
            fault="reward",
            env=SERVICE_PORT,
            prepare=start_service,
            settled_step=60,
        ),
        inject=slow_down_the_reward_server,
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("slow",),
            ranks=frozenset(),
            remedy=(r"reward|objective|second_user_code|\bhttp|py-spy|stack|profile|program|user code",),
            misleading=(*NODE_ACTIONS, r"network"),
        ),
        judge_seconds=30,
    ),
)
