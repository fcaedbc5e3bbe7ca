"""Numbers of the third set: a flipped bit, recurring spikes, exploding gradients, dead units, a loss scale used up.

A run ends after a hundred bad steps in a row; on a fast machine that is before the judgement, so `dead` is right too.
"""

from __future__ import annotations

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault

NODE_ACTIONS = (r"\bdrain\b", r"\breboot\b", r"replace the node")
NOT_A_NUMBER = r"\bnan\b|not (a number|finite)|non-finite|\binf(inite|inity)?\b"
SPIKE = r"spike|diverge|explod|loss (jump|rose|rise|is|went)|gradient norm"


def _model(fault: str, victim: int | None = None, **layout: int) -> JobRecipe:
    return JobRecipe(
        keys={"model": "third_numerics:build", "layout": {**layout, "micro_batch": 4}},
        program="third_numerics",
        fault=fault,
        victim=victim,
    )


FAULTS = (
    LiveFault(
        name="weight-bit-flips",
        family="numerics",
        summary="A bit in the exponent of one weight flips on rank 1 without an error; its replica computes nonsense.",
        source="https://github.com/pytorch/torchtitan/pull/4324",
        job=_model("flip", victim=1, replicate=2),
        expected=ExpectedVerdict(
            layers=("device", "framework"),
            conditions=("wrong", "dead"),
            ranks=frozenset({1}),
            remedy=(NOT_A_NUMBER, SPIKE, r"corrupt|weights|replica|differ"),
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="loss-spikes-again-and-again",
        family="numerics",
        summary="The logits of a custom model blow up for a few steps, recover, and blow up again every 25 steps.",
        source="https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/353",
        job=_model("spikes", fsdp=2),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong",),
            ranks=frozenset(),
            remedy=(SPIKE, r"learning rate|batch|data|clip|unstable|instabilit"),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="gradient-explodes-loss-drifts",
        family="numerics",
        summary="A term of a fine-tuning's objective has the value 0 and a huge gradient, which drowns all others.",
        source="https://github.com/OmniSVG/OmniSVG/issues/44",
        job=JobRecipe(
            kind="sft",
            keys={"objective": "third_numerics:loss", "layout": {"fsdp": 2, "micro_batch": 4}},
            program="third_numerics",
            fault="gradient",
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong", "dead"),
            ranks=frozenset(),
            remedy=(SPIKE, r"gradient|objective"),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="units-die",
        family="numerics",
        summary="One too large update kills all ReLUs of a layer: the loss stays at ln(vocabulary), gradients are 0.",
        source="https://github.com/keras-team/keras/issues/3425",
        job=_model("dead", fsdp=2),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong", "dead"),
            ranks=frozenset(),
            remedy=(
                SPIKE,
                r"gradient(s| norm)? (is|are|of|fell to|stays at) 0|zero gradient|learns? nothing|\bdead\b|stuck|flat",
                r"checkpoint|roll(s|ed)? ?back|learning rate",
            ),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="loss-scale-at-minimum",
        family="numerics",
        summary="Each gradient of a script overflows; its loss scale halves down to the minimum, then all ranks raise.",
        source="https://github.com/EleutherAI/gpt-neox/issues/291",
        job=JobRecipe(
            kind="command",
            keys={
                "command": ["{python}", "third_numerics.py"],
                "progress": {"pattern": "step {step} loss {loss}", "hang": "15m"},
            },
            program="third_numerics",
            fault="scale",
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("dead", "wrong"),
            ranks=None,
            remedy=(NOT_A_NUMBER, r"loss scale|overflow|half precision|fp16"),
            misleading=NODE_ACTIONS,
        ),
    ),
)
