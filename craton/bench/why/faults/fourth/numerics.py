"""Numbers of the fourth set: endless unlearning, one expert for all, evaluations of NaN, a bad row, lost updates."""

from __future__ import annotations

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault

PROGRAM = "fourth_numerics"
LAYOUT = {"fsdp": 2, "micro_batch": 4}
DATA = {"path": None, "tokenizer": None, "source": f"{PROGRAM}:samples"}
NODE_ACTIONS = (r"\bdrain\b", r"\breboot\b", r"replace the node")
NOT_A_NUMBER = r"\bnan\b|not (a number|finite)|non-finite|\binf(inite|inity)?\b"

FAULTS = (
    LiveFault(
        name="unlearning-has-no-end",
        family="numerics",
        summary="The forget term of a fine-tuning outweighs the rest: it climbs the loss, which rises step by step.",
        source="https://github.com/locuslab/open-unlearning/issues/167",
        job=JobRecipe(
            kind="sft", keys={"objective": f"{PROGRAM}:loss", "layout": LAYOUT}, program=PROGRAM, fault="forget"
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong", "dead"),
            ranks=frozenset(),
            remedy=(
                r"diverge|explod|spike|loss (jump|rose|rises|climb|grow|is|went)",
                r"objective|learning rate|\bsign\b",
            ),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="router-knows-one-expert",
        family="numerics",
        summary="A changed router sends all tokens to one of eight experts; seven idle, the loss hardly shows it.",
        source="https://github.com/pytorch/torchtitan/issues/1246",
        job=JobRecipe(
            keys={
                "objective": f"{PROGRAM}:loss",
                "model": {"experts": 8, "top_k": 1, "moe_ffn_hidden": 64},
                "layout": LAYOUT,
            },
            program=PROGRAM,
            fault="router",
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong", "slow", "healthy"),
            ranks=frozenset(),
            remedy=(r"expert|rout(er|ing)|balanc",),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="evaluation-is-nan",
        family="numerics",
        summary="An empty validation document has weight 0 / 0: each evaluation is NaN, while training goes well.",
        source="https://github.com/McGill-NLP/llm2vec/issues/174",
        job=JobRecipe(
            keys={
                "data": DATA,
                "train": {"evaluate": {"every_steps": 40, "sequences": 16}},
                "layout": {"replicate": 2, "micro_batch": 4},
            },
            program=PROGRAM,
            fault="evaluation",
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong", "healthy"),
            ranks=frozenset(),
            remedy=(rf"(evaluat|validat).*({NOT_A_NUMBER})", rf"({NOT_A_NUMBER}).*(evaluat|validat)"),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="new-token-not-initialised",
        family="numerics",
        summary="The embedding of a new token was never initialised: steps whose batch has it are NaN, on either rank.",
        source="https://github.com/sauradip/STALE/issues/16",
        job=JobRecipe(
            keys={"model": f"{PROGRAM}:build", "data": DATA, "layout": LAYOUT}, program=PROGRAM, fault="token"
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong",),
            ranks=frozenset(),
            remedy=(NOT_A_NUMBER,),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="updates-lost-in-rounding",
        family="numerics",
        summary="A script keeps its weights in bf16, and updates are too small for it: the loss never changes.",
        source="https://github.com/workofart/ml-by-hand/pull/85",
        job=JobRecipe(
            kind="command",
            keys={
                "command": ["{python}", f"{PROGRAM}.py"],
                "progress": {"pattern": "step {step} loss {loss}", "hang": "15m"},
            },
            program=PROGRAM,
            fault="rounding",
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong",),
            ranks=frozenset(),
            remedy=(
                r"loss (does not|has not|is not|did not|stays|is flat|no longer|is constant|is the same|never)",
                r"learns? nothing|not learn|flat|constant|stuck|unchanged|learning rate|precision|bf16|rounding",
            ),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=30,
    ),
)
