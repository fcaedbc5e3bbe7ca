"""Numbers of the fifth set: a mean of a mean, a replica apart, overflow in fp16, a large exponent, empty rows."""

from __future__ import annotations

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault

PROGRAM = "fifth_numerics"
OBJECTIVE = {"objective": f"{PROGRAM}:loss"}
SCRIPT = {
    "command": ["{python}", f"{PROGRAM}.py"],
    "progress": {"pattern": "step {step} loss {loss}", "hang": "15m"},
}
NODE_ACTIONS = (r"\bdrain\b", r"\breboot\b", r"replace the node")
NOT_A_NUMBER = r"\bnan\b|not (a number|finite)|non-finite|\binf(inite|inity)?\b"

FAULTS = (
    LiveFault(
        name="loss-averaged-twice",
        family="numerics",
        summary="A changed objective divides a mean by the number of tokens again: loss and gradient drop to 1 / 256.",
        source="https://github.com/BottleCapAI/NoCap-Test/pull/2",
        job=JobRecipe(
            kind="sft",
            keys={**OBJECTIVE, "layout": {"fsdp": 2, "micro_batch": 4}},
            program=PROGRAM,
            fault="averaged",
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong",),
            ranks=frozenset(),
            remedy=(
                r"loss (fell|falls|drop|collaps|jump|is|went|of|sank)|collaps|suspicious|too (small|low|good)|near 0",
                r"objective|normali[sz]|averag|scale|gradient",
            ),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="replica-drifts-apart",
        family="numerics",
        summary="Statistics that each rank keeps for itself run away on rank 1 of three: its loss jumps.",
        source="https://github.com/iCog-Labs-Dev/PC-Transformers/pull/135",
        job=JobRecipe(kind="command", nodes=3, keys=SCRIPT, program=PROGRAM, fault="drifts", victim=1),
        expected=ExpectedVerdict(
            layers=("framework", "device"),
            conditions=("wrong",),
            ranks=frozenset({1}),
            remedy=(
                r"diverge|drift|explod|spike|loss (jump|rose|rises|climb|grow|is|went|of)|differ|disagree|out of sync",
            ),
            misleading=(r"network",),
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="gradient-overflows-in-compression",
        family="numerics",
        summary="With a new loss scale, gradients are too large for the fp16 in which a script reduces them: NaN.",
        source="https://github.com/pytorch/pytorch/pull/59522",
        job=JobRecipe(kind="command", keys=SCRIPT, program=PROGRAM, fault="compressed"),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong",),
            ranks=frozenset(),
            remedy=(NOT_A_NUMBER,),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=25,
    ),
    LiveFault(
        name="perplexity-out-of-range",
        family="numerics",
        summary="The objective's perplexity of a whole document is e to the 900 and more; the last stage raises.",
        source="https://github.com/modelscope/FunASR/issues/2241",
        job=JobRecipe(keys={**OBJECTIVE, "layout": {"pp": 2, "micro_batch": 4}}, program=PROGRAM, fault="perplexity"),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("dead",),
            ranks=frozenset({1}),
            remedy=(r"OverflowError|math range error|overflow|perplexity|objective|fifth_numerics",),
            misleading=(*NODE_ACTIONS, r"network"),
        ),
    ),
    LiveFault(
        name="query-sees-only-padding",
        family="numerics",
        summary="Samples padded on the left give a custom model queries that see no token: a softmax of NaN.",
        source="https://github.com/pytorch/pytorch/issues/103749",
        job=JobRecipe(
            keys={
                "model": f"{PROGRAM}:build",
                "data": {"path": None, "tokenizer": None, "source": f"{PROGRAM}:samples"},
                "layout": {"replicate": 2, "micro_batch": 4},
            },
            program=PROGRAM,
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong", "dead"),
            ranks=frozenset(),
            remedy=(NOT_A_NUMBER,),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=25,
    ),
)
