"""Numbers of the second set: NaN that only the gradient or one sample has, a lost sign, half precision, bad units.

A run ends after a hundred bad steps in a row; on a fast machine that is before the judgement, so `dead` is right too.
"""

from __future__ import annotations

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault

LAYOUT = {"fsdp": 2, "micro_batch": 4}
NODE_ACTIONS = (r"\bdrain\b", r"\breboot\b", r"replace the node")
NOT_A_NUMBER = r"\bnan\b|not (a number|finite)|non-finite|\binf(inite|inity)?\b"
OBJECTIVE = {"objective": "second_numerics:loss"}

FAULTS = (
    LiveFault(
        name="gradient-nan-loss-finite",
        family="numerics",
        summary="The slope of a square root at 0 makes every gradient NaN; the loss itself stays finite.",
        source="https://github.com/pytorch/pytorch/issues/2421",
        job=JobRecipe(
            kind="sft", keys={**OBJECTIVE, "layout": LAYOUT}, program="second_numerics", fault="nan-gradient"
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong", "dead"),
            ranks=frozenset(),
            remedy=(NOT_A_NUMBER, r"gradient"),
            misleading=NODE_ACTIONS,
        ),
    ),
    LiveFault(
        name="sample-weights-nan",
        family="numerics",
        summary="The samples of rank 1 have a NaN among their token weights; the sum carries it to every rank.",
        source="https://github.com/prs-eth/Marigold/issues/111",
        job=JobRecipe(
            keys={
                "data": {"path": None, "tokenizer": None, "source": "second_numerics:weighted"},
                "layout": {"replicate": 2, "micro_batch": 4},
            },
            program="second_numerics",
            fault="weights",
            victim=1,
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong", "dead"),
            ranks=frozenset({1}),
            remedy=(NOT_A_NUMBER,),
            misleading=NODE_ACTIONS,
        ),
    ),
    LiveFault(
        name="script-overflows-in-half-precision",
        family="numerics",
        summary="The loss scale of a data-parallel script grows without limit; gradients overflow, the loss is NaN.",
        source="https://github.com/karpathy/nanoGPT/issues/167",
        job=JobRecipe(
            kind="command",
            keys={
                "command": ["{python}", "second_numerics.py"],
                "progress": {"pattern": "step {step} loss {loss}", "hang": "10x"},
            },
            program="second_numerics",
            fault="half",
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong",),
            ranks=frozenset(),
            remedy=(NOT_A_NUMBER,),
            misleading=NODE_ACTIONS,
        ),
    ),
    LiveFault(
        name="objective-loses-its-sign",
        family="numerics",
        summary="The objective of a pipeline returns the log-likelihood without its minus; the loss runs below 0.",
        source="https://github.com/wouterkool/attention-learn-to-route/issues/48",
        job=JobRecipe(
            keys={**OBJECTIVE, "layout": {"pp": 2, "micro_batch": 8}}, program="second_numerics", fault="sign"
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong", "dead"),
            ranks=frozenset(),
            remedy=(r"negative|below (0|zero)|diverge|\bsign\b|objective|loss (fell|falls|dropped|collapsed|is -)",),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="rank-computes-inf-now-and-then",
        family="numerics",
        summary="For every third batch or so a block of a custom model gives Inf on rank 1, as on a defective device.",
        source="https://github.com/pytorch/pytorch/issues/84803",
        job=JobRecipe(
            keys={"model": "second_numerics:build", "layout": LAYOUT},
            program="second_numerics",
            fault="device",
            victim=1,
        ),
        expected=ExpectedVerdict(
            layers=("device", "framework"),
            conditions=("wrong",),
            ranks=frozenset({1}),
            remedy=(NOT_A_NUMBER,),
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="nan-rolls-back-again-and-again",
        family="numerics",
        summary="Every loss is NaN from one step on; with on_nan: rollback the run returns to its checkpoint.",
        source="https://github.com/lucidrains/stylegan2-pytorch/pull/238",
        job=JobRecipe(
            keys={
                **OBJECTIVE,
                "train": {"on_nan": "rollback"},
                "checkpoint": {"tiers": [{"to": "shared", "every_steps": 20, "keep": 2}]},
                "layout": LAYOUT,
            },
            program="second_numerics",
            fault="rollback",
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong", "dead"),
            ranks=frozenset(),
            remedy=(NOT_A_NUMBER, r"roll(s|ed)? ?back"),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=30,
    ),
)
