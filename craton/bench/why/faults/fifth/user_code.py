"""User code of the fifth set: endless replacement, a wrong exchange, a missing guard, a loop, old gradients."""

from __future__ import annotations

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault

PROGRAM = "fifth_user_code"
COMMAND = {"command": ["{python}", f"{PROGRAM}.py"]}
SCRIPT = {**COMMAND, "progress": {"pattern": "step {step} loss {loss}", "hang": "15m"}}
MOE = {"experts": 4, "top_k": 2, "moe_ffn_hidden": 64}
NODE_ACTIONS = (r"drain|reboot|replace the node|add memory",)
OWN_CODE = r"py-spy|stack|profil|objective|fifth_user_code|program|user code"

FAULTS = (
    LiveFault(
        name="broken-samples-replaced-without-end",
        family="user_code",
        summary="The source of rank 0 replaces a broken sample by the next one, all are broken: RecursionError.",
        source="https://github.com/mittagessen/kraken/issues/403",
        job=JobRecipe(
            keys={
                "data": {"path": None, "tokenizer": None, "source": f"{PROGRAM}:samples"},
                "layout": {"replicate": 2, "micro_batch": 4},
            },
            program=PROGRAM,
            victim=0,
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("dead",),
            ranks=frozenset({0}),
            remedy=(r"RecursionError|recursion|fifth_user_code|data source",),
            misleading=(*NODE_ACTIONS, r"network"),
        ),
    ),
    LiveFault(
        name="both-ranks-send-first",
        family="user_code",
        summary="A changed exchange of a script sends before it receives on both ranks; each waits for the other.",
        source="https://github.com/NVIDIA/nccl/issues/479",
        job=JobRecipe(kind="command", keys=SCRIPT, program=PROGRAM, fault="exchange"),
        expected=ExpectedVerdict(
            layers=("collective", "framework"),
            conditions=("hung", "dead"),
            ranks=None,
            remedy=(
                r"\bsend\b|\brecv\b|exchange|deadlock|wait(s|ing)? for (each other|the other|another)|order",
                r"py-spy|stack|fifth_user_code|collective",
            ),
            misleading=(*NODE_ACTIONS, r"(cable|switch|firewall)"),
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="script-without-main-guard",
        family="user_code",
        summary="A script starts worker processes without a guard; each runs the script again, and the pool breaks.",
        source="https://github.com/AnswerDotAI/fsdp_qlora/issues/28",
        job=JobRecipe(kind="command", keys=COMMAND, program=PROGRAM, fault="guard"),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("dead",),
            ranks=None,
            remedy=(r"BrokenProcessPool|bootstrapping|__main__|freeze_support|start a new process|fifth_user_code",),
            misleading=(*NODE_ACTIONS, r"network"),
        ),
        judge_seconds=25,
    ),
    LiveFault(
        name="loop-over-tokens-in-python",
        family="user_code",
        summary="A new metric of the objective looks at each token in Python loops; steps take several times as long.",
        source="https://github.com/tokenbender/avataRL/issues/42",
        job=JobRecipe(
            keys={
                "objective": f"{PROGRAM}:objective",
                "model": MOE,
                "layout": {"fsdp": 2, "micro_batch": 4},
            },
            program=PROGRAM,
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("slow",),
            ranks=frozenset(),
            remedy=(OWN_CODE, r"compute|loop|vectori[sz]e|\.item\b"),
            misleading=(*NODE_ACTIONS, r"network"),
        ),
        judge_seconds=35,
    ),
    LiveFault(
        name="gradients-never-reset",
        family="user_code",
        summary="After a change a script no longer calls zero_grad: gradients of all steps add up, the loss explodes.",
        source="https://github.com/IBM/aihwkit/issues/446",
        job=JobRecipe(kind="command", keys=SCRIPT, program=PROGRAM, fault="accumulates"),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong",),
            ranks=frozenset(),
            remedy=(
                r"diverge|explod|spike|loss (jump|rose|rises|climb|grow|is|went)|gradient|zero_grad|learning rate",
            ),
            misleading=(*NODE_ACTIONS, r"network"),
        ),
        judge_seconds=30,
    ),
)
