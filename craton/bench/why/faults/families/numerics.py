"""Numbers that go wrong: NaN, Inf, spikes, a loss without labels.

A run ends after a hundred bad steps in a row; on a fast machine that is before the judgement, so `dead` is right too.
"""

from __future__ import annotations

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault

LAYOUT = {"fsdp": 2, "micro_batch": 4}
NODE_ACTIONS = (r"\bdrain\b", r"\breboot\b", r"replace the node")
NOT_A_NUMBER = (r"\bnan\b", r"not (a number|finite)", r"non-finite", r"\binf\b")


def _objective(fault: str, victim: int | None = None, **keys: object) -> JobRecipe:
    return JobRecipe(
        keys={"objective": "numerics:loss", "layout": LAYOUT, **keys}, program="numerics", fault=fault, victim=victim
    )


FAULTS = (
    LiveFault(
        name="loss-nan",
        family="numerics",
        summary="The objective computes 0 · log 0 on every rank; with on_nan: skip every update is skipped.",
        source="https://github.com/meta-pytorch/torchtune/issues/2341",
        job=_objective("log-of-zero"),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong", "dead"),
            ranks=frozenset(),
            remedy=NOT_A_NUMBER,
            misleading=NODE_ACTIONS,
        ),
    ),
    LiveFault(
        name="loss-nan-on-one-rank",
        family="numerics",
        summary="Only rank 1 computes NaN; the sum over all ranks carries it to every rank.",
        source="https://github.com/pytorch/torchtitan/issues/951",
        job=_objective("log-of-zero", victim=1),
        expected=ExpectedVerdict(
            layers=("framework", "device"),
            conditions=("wrong", "dead"),
            ranks=frozenset({1}),
            remedy=NOT_A_NUMBER,
        ),
    ),
    LiveFault(
        name="loss-nan-stops-the-run",
        family="numerics",
        summary="The loss is NaN and the job has on_nan: stop, so the run ends as failed.",
        source="https://github.com/pytorch/torchtitan/pull/3863",
        job=_objective("log-of-zero", train={"on_nan": "stop"}),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("dead", "wrong"),
            remedy=NOT_A_NUMBER,
            misleading=NODE_ACTIONS,
        ),
    ),
    LiveFault(
        name="loss-inf-in-moe",
        family="numerics",
        summary="The loss of a mixture of experts overflows to Inf on every rank.",
        source="https://github.com/HomebrewML/Olmax/issues/16",
        job=_objective(
            "overflow",
            model={"experts": 4, "top_k": 2, "moe_ffn_hidden": 64},
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong", "dead"),
            ranks=frozenset(),
            remedy=NOT_A_NUMBER,
            misleading=NODE_ACTIONS,
        ),
    ),
    LiveFault(
        name="loss-spike",
        family="numerics",
        summary="The loss jumps to ten times its level at one step and stays there.",
        source="https://github.com/stas00/ml-engineering/issues/32",
        job=_objective("spike"),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong",),
            ranks=frozenset(),
            remedy=(r"spike", r"loss (jump|rose|rise|is)", r"learning rate", r"batch|data"),
            misleading=NODE_ACTIONS,
        ),
    ),
    LiveFault(
        name="activations-overflow",
        family="numerics",
        summary="The hidden states of a custom model grow at every step until they overflow.",
        source="https://github.com/mosaicml/llm-foundry/issues/759",
        job=JobRecipe(keys={"model": "numerics_model:build", "layout": LAYOUT}, program="numerics_model"),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong", "dead"),
            ranks=frozenset(),
            remedy=(*NOT_A_NUMBER, r"diverge", r"gradient norm", r"spike"),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="labels-all-masked",
        family="numerics",
        summary="From one step on every label is masked, so the loss is a sum over nothing.",
        source="https://github.com/NVIDIA-NeMo/Automodel/issues/3796",
        job=JobRecipe(
            keys={"data": {"path": None, "tokenizer": None, "source": "numerics:masked"}, "layout": LAYOUT},
            program="numerics",
            fault="masked",
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong", "dead"),
            ranks=frozenset(),
            remedy=(*NOT_A_NUMBER, r"label", r"mask", r"weight", r"loss (is|fell to) 0"),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="loss-zero-in-lora",
        family="numerics",
        summary="The loss of a LoRA fine-tuning is 0 from one step on; nothing is learnt any more.",
        source="https://github.com/haotian-liu/LLaVA/issues/375",
        job=JobRecipe(
            kind="sft",
            keys={
                "objective": "numerics:loss",
                "train": {"lora": {"rank": 4}},
                "layout": LAYOUT,
            },
            program="numerics",
            fault="nothing-to-learn",
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong",),
            ranks=frozenset(),
            remedy=(
                r"loss (is|fell to|stays at) 0",
                r"label",
                r"mask",
                r"zero gradient",
                r"gradient.*\b0\b",
                r"learns? nothing",
            ),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=30,
    ),
)
