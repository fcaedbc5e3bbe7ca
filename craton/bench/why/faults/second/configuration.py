"""Configuration of the second set: old addresses, wrong paths, other checkpoints, timeouts, keys, warm-up."""

from __future__ import annotations

from collections.abc import Mapping

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault

NODE_ACTIONS = (r"\bdrain\b", r"\breboot\b", r"replace the node")
PROGRESS = {"progress": {"pattern": "step {step} loss {loss}", "hang": "15m"}}


def _script(fault: str, keys: Mapping[str, object] | None = None, nodes: int = 2) -> JobRecipe:
    return JobRecipe(
        kind="command",
        nodes=nodes,
        keys={"command": ["{python}", "second_configuration.py"], **(keys or {})},
        program="second_configuration",
        fault=fault,
    )


FAULTS = (
    LiveFault(
        name="rendezvous-host-unknown",
        family="configuration",
        summary="Rank 1 of a script still has the rendezvous host of an old cluster, a name without an address.",
        source="https://github.com/Lightning-AI/pytorch-lightning/issues/1542",
        job=_script("host"),
        expected=ExpectedVerdict(
            layers=("framework", "fabric"),
            conditions=("dead",),
            ranks=frozenset({1}),
            remedy=(r"gaierror|Name or service not known|name resolution|resolve|host ?name|old-cluster|\bDNS\b",),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="validation-path-wrong",
        family="configuration",
        summary="The path of the validation data has a typing error, which rank 0 finds at the first evaluation.",
        source="https://github.com/hkchengrex/MMAudio/issues/79",
        job=_script("path", PROGRESS),
        expected=ExpectedVerdict(
            layers=("framework", "storage"),
            conditions=("dead",),
            ranks=frozenset({0}),
            remedy=(r"FileNotFoundError|No such file|validation-v2",),
            misleading=NODE_ACTIONS,
        ),
    ),
    LiveFault(
        name="checkpoint-of-another-model",
        family="configuration",
        summary="A script resumes a model of 256 units from a checkpoint with 128; every rank raises at its start.",
        source="https://github.com/acids-ircam/RAVE/issues/196",
        job=_script("resume"),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("dead",),
            remedy=(r"size mismatch|state_dict|checkpoint|shape",),
            misleading=NODE_ACTIONS,
        ),
    ),
    LiveFault(
        name="collective-timeout-too-short",
        family="configuration",
        summary="Rank 0 evaluates for 30 s, and the process group allows 6 s: the all-reduce of the others times out.",
        source="https://github.com/huggingface/transformers/issues/17106",
        job=_script("timeout", PROGRESS, nodes=3),
        expected=ExpectedVerdict(
            layers=("framework", "collective"),
            conditions=("dead",),
            remedy=(r"time(d)?[ -]?out",),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="tracker-key-missing",
        family="configuration",
        summary="The key of the experiment tracker is not in the environment; every rank raises at its start.",
        source="https://github.com/OptimalScale/LMFlow/issues/65",
        job=_script("key"),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("dead",),
            remedy=(r"api_key|TRACKER_KEY|not configured|login",),
            misleading=NODE_ACTIONS,
        ),
    ),
    LiveFault(
        name="warm-up-without-end",
        family="configuration",
        summary="The warm-up was given in tokens instead of steps: the learning rate stays near 0, nothing is learnt.",
        source="https://github.com/jaehyunnn/ViTPose_pytorch/issues/9",
        job=JobRecipe(
            keys={
                "objective": "second_configuration:loss",
                "train": {"steps": 4_000_000, "warmup_steps": 3_000_000, "learning_rate": 1e-4},
                "layout": {"fsdp": 2, "micro_batch": 4},
            },
            program="second_configuration",
            fault="warm-up",
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong",),
            ranks=frozenset(),
            remedy=(
                r"learning[ _]rate|\blr\b|warm-?_?up",
                r"loss (does not|has not|is not|did not|stays|is flat|no longer)",
                r"learns? nothing|not learn",
            ),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=40,
    ),
)
