"""Configuration of the fourth set: a backend for GPUs, a tight limit, a long evaluation, ASCII, a debug mode."""

from __future__ import annotations

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault

PROGRAM = "fourth_configuration"
SCRIPT = {"command": ["{python}", f"{PROGRAM}.py"]}
LAYOUT = {"fsdp": 2, "micro_batch": 4}
NODE_ACTIONS = (r"\bdrain\b", r"\breboot\b", r"replace the node")

FAULTS = (
    LiveFault(
        name="backend-for-gpus-on-cpus",
        family="configuration",
        summary="A script asks for NCCL on machines without GPUs, with a PyTorch that has none; all three ranks raise.",
        source="https://github.com/pytorch/pytorch/issues/159742",
        job=JobRecipe(kind="command", nodes=3, keys=SCRIPT, program=PROGRAM, fault="backend"),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("dead",),
            ranks=None,
            remedy=(r"\bNCCL\b|\bgloo\b|backend|without GPU|no GPU",),
            misleading=NODE_ACTIONS,
        ),
    ),
    LiveFault(
        name="spike-limit-too-tight",
        family="configuration",
        summary="A LoRA fine-tuning takes a loss 0.1% above its level for a spike: half of the steps are skipped.",
        source="https://github.com/facebookresearch/metaseq/pull/551",
        job=JobRecipe(
            kind="sft",
            keys={
                "objective": f"{PROGRAM}:loss",
                "train": {"lora": {"rank": 4}, "on_spike": {"factor": 1.001, "policy": "skip"}},
                "layout": {"replicate": 2, "micro_batch": 4},
            },
            program=PROGRAM,
            fault="spikes",
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong", "dead", "slow"),
            ranks=frozenset(),
            remedy=(r"on_spike|\bfactor\b|skip(s|ped|ping)?\b|recent level",),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="evaluation-without-end",
        family="configuration",
        summary="Step 40 begins an evaluation of 400,000 sequences instead of 400: no step for many minutes.",
        source="https://github.com/marcbelmont/cnn-watermark-removal/issues/28",
        job=JobRecipe(
            keys={
                "objective": f"{PROGRAM}:loss",
                "data": {"validation": "{data}/validation.txt"},
                "train": {"evaluate": {"every_steps": 40, "sequences": 400_000}},
                "layout": LAYOUT,
            },
            program=PROGRAM,
            fault="evaluation",
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("slow", "healthy"),
            ranks=frozenset(),
            remedy=(r"evaluat|validation",),
            misleading=(*NODE_ACTIONS, r"network|\bkill\b"),
        ),
        judge_seconds=40,
    ),
    LiveFault(
        name="output-is-ascii",
        family="configuration",
        summary="The image has an ASCII locale; rank 0 raises when it prints its first sample with an umlaut.",
        source="https://github.com/alexjc/neural-enhance/issues/199",
        job=JobRecipe(
            kind="command",
            keys={**SCRIPT, "progress": {"pattern": "step {step} loss {loss}", "hang": "15m"}},
            program=PROGRAM,
            fault="output",
            env={"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"},
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("dead",),
            ranks=frozenset({0}),
            remedy=(r"UnicodeEncodeError|ascii|locale|encod|PYTHONIOENCODING|\bLANG\b|UTF-?8",),
            misleading=NODE_ACTIONS,
        ),
    ),
    LiveFault(
        name="debug-mode-left-on",
        family="configuration",
        summary="The settings turn on autograd's anomaly detection at step 100; each step takes several times as long.",
        source="https://github.com/Lightning-AI/pytorch-lightning/issues/17359",
        job=JobRecipe(
            keys={"model": f"{PROGRAM}:build", "layout": {"replicate": 2, "micro_batch": 4}},
            program=PROGRAM,
            fault="debug",
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("slow",),
            ranks=frozenset(),
            remedy=(r"anomaly|debug|compute|profil|py-spy|stack|program|user code|fourth_configuration",),
            misleading=(*NODE_ACTIONS, r"network"),
        ),
        judge_seconds=40,
    ),
)
