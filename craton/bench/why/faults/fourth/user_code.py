"""User code of the fourth set: a slow pattern, a kept graph, hidden exceptions, compiling again, unequal tensors."""

from __future__ import annotations

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault

PROGRAM = "fourth_user_code"
OBJECTIVE = {"objective": f"{PROGRAM}:objective"}
SCRIPT = {
    "command": ["{python}", f"{PROGRAM}.py"],
    "progress": {"pattern": "step {step} loss {loss}", "hang": "15m"},
}
MOE = {"experts": 4, "top_k": 2, "moe_ffn_hidden": 64}
NODE_ACTIONS = (r"drain|reboot|replace the node|add memory",)
OWN_CODE = r"py-spy|stack|profil|objective|fourth_user_code|program|user code"

FAULTS = (
    LiveFault(
        name="pattern-backtracks-without-end",
        family="user_code",
        summary="A pattern of the objective has 2^47 ways to read a cut answer; rank 1 tries them and keeps the GIL.",
        source="https://github.com/huggingface/trl/issues/5415",
        job=JobRecipe(
            keys={**OBJECTIVE, "layout": {"tp": 2, "micro_batch": 4}}, program=PROGRAM, fault="regex", victim=1
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("hung", "dead"),
            ranks=frozenset({1}),
            remedy=(OWN_CODE, r"regular expression|regex|fullmatch|busy|100 ?% of a (CPU|core)|spin|loop"),
            misleading=(*NODE_ACTIONS, r"network"),
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="graph-of-last-step-kept",
        family="user_code",
        summary="The moving average of a LoRA objective keeps its graph; the next backward pass runs through it again.",
        source="https://github.com/davda54/sam/issues/10",
        job=JobRecipe(
            kind="sft",
            keys={**OBJECTIVE, "train": {"lora": {"rank": 4}}, "layout": {"fsdp": 2, "micro_batch": 4}},
            program=PROGRAM,
            fault="baseline",
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("dead",),
            ranks=None,
            remedy=(r"backward through the graph|second time|retain_graph|detach|inplace|objective|fourth_user_code",),
            misleading=(*NODE_ACTIONS, r"network"),
        ),
    ),
    LiveFault(
        name="exceptions-swallowed",
        family="user_code",
        summary="From one step on every batch of a script raises; it prints a warning, skips the batch and goes on.",
        source="https://github.com/cheng-01037/Self-supervised-Fewshot-Medical-Image-Segmentation/issues/32",
        job=JobRecipe(kind="command", keys=SCRIPT, program=PROGRAM, fault="swallows"),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong",),
            ranks=frozenset(),
            remedy=(
                r"skipp(ing|ed|s)|shapes cannot be multiplied|RuntimeError|swallow",
                r"loss (does not|has not|is not|did not|stays|is flat|no longer|is constant|is the same)|not learn",
            ),
            misleading=(*NODE_ACTIONS, r"network"),
        ),
        judge_seconds=35,
    ),
    LiveFault(
        name="compiles-in-every-step",
        family="user_code",
        summary="A compiled score of the objective depends on the name of the step: each rank compiles it each time.",
        source="https://github.com/pytorch/ao/issues/2500",
        job=JobRecipe(
            keys={**OBJECTIVE, "model": MOE, "layout": {"replicate": 2, "micro_batch": 4}},
            program=PROGRAM,
            fault="compile",
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("slow",),
            ranks=frozenset(),
            remedy=(OWN_CODE, r"compil|dynamo|compute"),
            misleading=(*NODE_ACTIONS, r"network"),
        ),
        judge_seconds=40,
    ),
    LiveFault(
        name="gathers-unequal-tensors",
        family="user_code",
        summary="Rank 2 of three gathers more tokens than the others, which expect equal sizes; rank 0 aborts.",
        source="https://github.com/pytorch/pytorch/issues/56112",
        job=JobRecipe(kind="command", nodes=3, keys=SCRIPT, program=PROGRAM, fault="gather", victim=2),
        expected=ExpectedVerdict(
            layers=("framework", "collective"),
            conditions=("dead",),
            ranks=None,
            remedy=(
                r"preamble|size doesn't match|mismatch|all_gather|EnforceNotMet|(different|unequal|same) (size|shape)",
            ),
            misleading=(*NODE_ACTIONS, r"(cable|switch|firewall|link)"),
        ),
    ),
)
