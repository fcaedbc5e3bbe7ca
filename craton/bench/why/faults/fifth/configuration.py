"""Configuration of the fifth set: a module that hides another, a table of positions, a ramp, a hang limit, epsilon."""

from __future__ import annotations

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.running import RunningJob

PROGRAM = "fifth_configuration"
SCRIPT = {"command": ["{python}", f"{PROGRAM}.py"]}
PATTERN = "step {step} loss {loss}"
NODE_ACTIONS = (r"\bdrain\b", r"\breboot\b", r"replace the node")
BASELINE = '"""Random baselines of the team."""\n\n\ndef guess(count: int) -> list[int]:\n    return [0] * count\n'


def _write_helpers(job: RunningJob) -> None:
    """Write a folder of helpers with a file `random.py`, as a user names it."""
    folder = job.folder.parent / "helpers"
    folder.mkdir()
    (folder / "random.py").write_text(BASELINE)


FAULTS = (
    LiveFault(
        name="file-hides-a-module",
        family="configuration",
        summary="PYTHONPATH names a folder with a file random.py, which hides Python's own; no rank can import torch.",
        source="https://github.com/moseskim/RecommenderSystems/pull/10",
        job=JobRecipe(
            kind="command",
            keys=SCRIPT,
            program=PROGRAM,
            fault="shadow",
            env={"PYTHONPATH": "{folder}/helpers"},
            prepare=_write_helpers,
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("dead",),
            ranks=None,
            remedy=(r"random|ImportError|cannot import|AttributeError|PYTHONPATH|shadow|import",),
            misleading=NODE_ACTIONS,
        ),
    ),
    LiveFault(
        name="positions-beyond-the-table",
        family="configuration",
        summary="From step 100 on positions are shifted by 64, but the model's table has 64 rows: index out of range.",
        source="https://github.com/bentrevett/pytorch-seq2seq/issues/89",
        job=JobRecipe(
            keys={"model": f"{PROGRAM}:build", "layout": {"replicate": 2, "micro_batch": 4}},
            program=PROGRAM,
            fault="positions",
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("dead",),
            ranks=None,
            remedy=(r"index out of range|IndexError|position|embedding",),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=25,
    ),
    LiveFault(
        name="batch-ramp-too-short",
        family="configuration",
        summary="The ramp of the batch size is in steps, not in thousands of them: step 60 has 128 times the batch.",
        source="https://github.com/bghira/SimpleTuner/issues/970",
        job=JobRecipe(
            kind="command",
            keys={**SCRIPT, "progress": {"pattern": PATTERN, "hang": "15m"}},
            program=PROGRAM,
            fault="ramp",
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("slow",),
            ranks=frozenset(),
            remedy=(r"batch|ramp|comput|profil|py-spy|stack|program|user code|fifth_configuration",),
            misleading=(*NODE_ACTIONS, r"network"),
        ),
        judge_seconds=40,
    ),
    LiveFault(
        name="hang-limit-too-short",
        family="configuration",
        summary="The job counts 8 s without a step as a hang; a healthy script is killed while it evaluates.",
        source="https://github.com/flagos-ai/FlagScale/pull/1267",
        job=JobRecipe(
            kind="command",
            keys={**SCRIPT, "progress": {"pattern": PATTERN, "hang": "8s"}},
            program=PROGRAM,
            fault="evaluation",
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("dead", "hung"),
            ranks=None,
            remedy=(r"progress\.hang|\bhang\b|hang limit|no (progress|step|line)|evaluat|without progress",),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=40,
    ),
    LiveFault(
        name="epsilon-without-its-minus",
        family="configuration",
        summary="The epsilon of AdamW is 1e8 instead of 1e-8: every update is divided by it, and nothing is learnt.",
        source="https://github.com/okoge-kaz/llm-recipes/pull/8",
        job=JobRecipe(
            keys={
                "objective": f"{PROGRAM}:loss",
                "model": {"experts": 4, "top_k": 2, "moe_ffn_hidden": 64},
                "train": {"epsilon": 1e8, "weight_decay": 0.0},
                "layout": {"fsdp": 2, "micro_batch": 4},
            },
            program=PROGRAM,
            fault="epsilon",
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong",),
            ranks=frozenset(),
            remedy=(
                r"epsilon|learning[ _]rate|\blr\b|optimi[sz]er|update",
                r"loss (does not|has not|is not|did not|stays|is flat|no longer)",
                r"learns? nothing|not learn",
            ),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=40,
    ),
)
