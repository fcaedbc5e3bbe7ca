"""Faults of the user's own code: objectives, models and scripts that exit, raise, spin, leak, fork or print."""

from __future__ import annotations

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault

OBJECTIVE = {"objective": "user_code:objective"}
SCRIPT = {"command": ["{python}", "user_code.py"], "progress": {"pattern": "step {step} loss {loss}", "hang": "10x"}}
MOE_MODEL = {
    **{"name": "tiny-moe", "layers": 2, "hidden": 64, "heads": 4, "vocab": 512},
    **{"experts": 4, "top_k": 2, "moe_ffn_hidden": 64},
}

FAULTS = (
    LiveFault(
        name="objective-exits-zero",
        family="user_code",
        summary="A custom objective ends rank 1 with sys.exit(0): an early stop that only one rank decides.",
        source="https://github.com/GestaltCogTeam/BasicTS/issues/250",
        job=JobRecipe(keys={**OBJECTIVE, "layout": {"replicate": 2}}, program="user_code", fault="exits 0", victim=1),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("dead",),
            ranks=frozenset({1}),
            remedy=(
                r"exit(ed|s)?\b.{0,40}\b(code )?0\b",
                r"sys\.exit|SystemExit",
                r"(ended|exited|left|returned) (early|too early|by itself|before)",
            ),
            misleading=(r"drain|replace the node|add memory",),
        ),
    ),
    LiveFault(
        name="script-exits-three",
        family="user_code",
        summary="A data-parallel script ends on rank 2 of 3 with exit code 3 and prints no reason.",
        source="https://github.com/NVIDIA/nccl-tests/issues/294",
        job=JobRecipe(kind="command", nodes=3, keys=SCRIPT, program="user_code", victim=2),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("dead",),
            ranks=frozenset({2}),
            remedy=(r"\bcode 3\b|exit(ed)? 3\b",),
            misleading=(r"drain|replace the node|add memory|network",),
        ),
    ),
    LiveFault(
        name="objective-raises-on-one-rank",
        family="user_code",
        summary="A custom objective of a LoRA fine-tuning raises a KeyError on rank 0 only.",
        source="https://github.com/pytorch/pytorch/issues/163546",
        job=JobRecipe(
            kind="sft",
            keys={**OBJECTIVE, "train": {"lora": {"rank": 4}}},
            program="user_code",
            fault="raises",
            victim=0,
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("dead",),
            ranks=frozenset({0}),
            remedy=(r"KeyError|no reward for|look_up_reward|user_code\.py",),
            misleading=(r"drain|replace the node|add memory|network",),
        ),
    ),
    LiveFault(
        name="model-raises-on-all-ranks",
        family="user_code",
        summary="A custom model adds a mask of the wrong size; every rank raises in the same step.",
        source="https://github.com/foundation-model-stack/fms-hf-tuning/issues/411",
        job=JobRecipe(
            keys={"model": "user_code:build", "layout": {"fsdp": 2}}, program="user_code", fault="raises everywhere"
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("dead",),
            ranks=None,
            remedy=(r"size of tensor|must match|RuntimeError|user_code\.py",),
            misleading=(r"drain|replace the node|add memory|network",),
        ),
    ),
    LiveFault(
        name="objective-spins",
        family="user_code",
        summary="A sampling loop in the objective never finds a sample on rank 1; the pipeline waits for it.",
        source="https://github.com/thunlp/OpenNE/issues/10",
        job=JobRecipe(
            keys={**OBJECTIVE, "layout": {"pp": 2, "micro_batch": 8}}, program="user_code", fault="spins", victim=1
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("hung", "dead"),
            ranks=frozenset({1}),
            remedy=(r"py-spy|stack|loop|spin|busy|user_code|draw_negative|100 ?% of a (CPU|core)|hang",),
            misleading=(r"drain|replace the node|add memory",),
        ),
    ),
    LiveFault(
        name="objective-leaks-memory",
        family="user_code",
        summary="An objective keeps 48 MiB of every step on rank 1 until the memory limit of its container kills it.",
        source="https://github.com/KevinMusgrave/pytorch-metric-learning/issues/421",
        job=JobRecipe(
            keys={**OBJECTIVE, "model": MOE_MODEL, "layout": {"replicate": 2}, "checkpoint": {"peer": "off"}},
            program="user_code",
            fault="leaks",
            victim=1,
            cgroups={"memory": {"memory.limit_in_bytes": "3G"}},
        ),
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("dead",),
            ranks=frozenset({1}),
            remedy=(r"memory",),
            misleading=(r"network|fabric",),
        ),
        judge_seconds=90,
        needs=("root", "cgroup:memory"),
    ),
    LiveFault(
        name="objective-forks",
        family="user_code",
        summary="An objective forks a child on rank 0, waits for it, and the child waits for a lock forever.",
        source="https://github.com/huggingface/tokenizers/issues/187",
        job=JobRecipe(keys={**OBJECTIVE, "layout": {"fsdp": 2}}, program="user_code", fault="forks", victim=0),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("hung", "dead"),
            ranks=frozenset({0}),
            remedy=(r"fork|child|waitpid|wait4|do_wait|stack|py-spy|user_code|deadlock|hang",),
            misleading=(r"drain|replace the node|add memory",),
        ),
    ),
    LiveFault(
        name="objective-leaves-an-alarm",
        family="user_code",
        summary="A timeout helper of the objective leaves a timer running; SIGALRM ends rank 1 a second later.",
        source="https://github.com/pnpnpn/timeout-decorator/pull/14",
        job=JobRecipe(
            nodes=3,
            keys={**OBJECTIVE, "train": {"global_batch_sequences": 6}, "layout": {"fsdp": 3}},
            program="user_code",
            fault="alarm",
            victim=1,
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("dead",),
            ranks=frozenset({1}),
            remedy=(r"SIGALRM|alarm|timer|signal 14",),
            misleading=(r"drain|replace the node|add memory",),
        ),
    ),
    LiveFault(
        name="objective-prints-without-end",
        family="user_code",
        summary="A debug print of all log-probabilities in every step on rank 0 makes each step several times as long.",
        source="https://github.com/ccpem/affinity-vae/pull/248",
        job=JobRecipe(keys={**OBJECTIVE, "layout": {"replicate": 2}}, program="user_code", fault="prints", victim=0),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("slow",),
            ranks=frozenset({0}),
            remedy=(r"print|output|log|user_code|objective|profile|compute|py-spy|program",),
            misleading=(r"drain|replace the node|add memory|network",),
        ),
        judge_seconds=40,
    ),
)
