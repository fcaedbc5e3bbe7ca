"""User code of the third set: a full pipe, a thread that never ends, a detached loss, garbage collection, history."""

from __future__ import annotations

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault

OBJECTIVE = {"objective": "third_user_code:objective"}
MOE = {"experts": 4, "top_k": 2, "moe_ffn_hidden": 64}
NODE_ACTIONS = (r"drain|reboot|replace the node|add memory",)
OWN_CODE = r"py-spy|stack|profil|objective|third_user_code|program|user code"


FAULTS = (
    LiveFault(
        name="scorer-fills-its-pipe",
        family="user_code",
        summary="The objective of rank 1 waits for a scorer to end before it reads its output; the pipe is full.",
        source="https://github.com/oumi-ai/oumi/pull/412",
        job=JobRecipe(
            keys={**OBJECTIVE, "layout": {"replicate": 2, "micro_batch": 4}},
            program="third_user_code",
            fault="scorer",
            victim=1,
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("hung", "dead"),
            ranks=frozenset({1}),
            remedy=(OWN_CODE, r"child|pipe|subprocess|scorer|wait4|waitpid|do_wait"),
            misleading=(*NODE_ACTIONS, r"network"),
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="exit-waits-for-thread",
        family="user_code",
        summary="A script has finished on both ranks, but a thread of rank 1 that is no daemon keeps it from exiting.",
        source="https://github.com/facebookresearch/spdl/pull/1591",
        job=JobRecipe(
            kind="command",
            keys={
                "command": ["{python}", "third_user_code.py"],
                "progress": {"pattern": "step {step} loss {loss}", "hang": "10x"},
            },
            program="third_user_code",
            fault="exit",
            victim=1,
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("hung", "dead"),
            ranks=frozenset({1}),
            remedy=(OWN_CODE, r"training finished|thread|does not (exit|end)|daemon|decoder|exit"),
            misleading=(*NODE_ACTIONS, r"network"),
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="loss-without-gradient",
        family="user_code",
        summary="The objective of a LoRA fine-tuning returns a detached loss without a gradient; every rank raises.",
        source="https://github.com/hpcaitech/ColossalAI/issues/6225",
        job=JobRecipe(
            kind="sft",
            keys={**OBJECTIVE, "train": {"lora": {"rank": 4}}, "layout": {"fsdp": 2, "micro_batch": 4}},
            program="third_user_code",
            fault="detached",
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("dead",),
            ranks=None,
            remedy=(r"does not require grad|grad_fn|detach|requires_grad|objective|third_user_code",),
            misleading=(*NODE_ACTIONS, r"network"),
        ),
    ),
    LiveFault(
        name="garbage-collected-every-step",
        family="user_code",
        summary="The objective of rank 0 calls gc.collect() in every step while it caches millions of objects.",
        source="https://github.com/karpathy/nanochat/pull/477",
        job=JobRecipe(
            keys={**OBJECTIVE, "model": MOE, "layout": {"fsdp": 2, "micro_batch": 4}},
            program="third_user_code",
            fault="garbage",
            victim=0,
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("slow",),
            ranks=frozenset({0}),
            remedy=(OWN_CODE, r"garbage|gc\.collect|compute|straggler"),
            misleading=(*NODE_ACTIONS, r"network"),
        ),
        judge_seconds=35,
    ),
    LiveFault(
        name="step-time-grows",
        family="user_code",
        summary="The objective of each rank compares all batches so far with each other; each step is slower.",
        source="https://github.com/leopard-ai/betty/issues/1",
        job=JobRecipe(
            keys={**OBJECTIVE, "layout": {"tp": 2, "micro_batch": 4}},
            program="third_user_code",
            fault="history",
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("slow",),
            ranks=frozenset(),
            remedy=(OWN_CODE, r"compute|slower and slower|grow"),
            misleading=(*NODE_ACTIONS, r"network"),
        ),
        judge_seconds=40,
    ),
)
