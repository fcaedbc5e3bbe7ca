"""Jobs that are configured wrongly: learning rate, batch, tokenizer, layout, ports, packages, intervals."""

from __future__ import annotations

import socket
import sys

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.running import RunningJob

LAYOUT = {"fsdp": 2, "micro_batch": 4}
NODE_ACTIONS = (r"\bdrain\b", r"\breboot\b", r"replace the node")


def _script(fault: str) -> JobRecipe:
    return JobRecipe(
        kind="command",
        keys={"command": [sys.executable, "configuration.py"]},
        program="configuration",
        fault=fault,
        prepare=take_port if fault == "port" else None,
    )


def take_port(job: RunningJob) -> None:
    """Listen on a port, as another job on the node does, and configure the script with the same port."""
    listener = socket.create_server(("127.0.0.1", 0))
    job.undo.callback(listener.close)
    (job.folder / "port.txt").write_text(str(listener.getsockname()[1]))


def limit_memory(job: RunningJob) -> None:
    """Limit the memory of the run's container after the plan was made, as on nodes with less memory than planned."""
    (job.cgroups["memory"] / "memory.limit_in_bytes").write_text("3G")


FAULTS = (
    LiveFault(
        name="learning-rate-too-high",
        family="configuration",
        summary="The learning rate is a thousand times too high, without gradient clipping; the loss diverges.",
        source="https://github.com/OpenNMT/OpenNMT-tf/issues/744",
        job=JobRecipe(
            keys={"train": {"learning_rate": 3.0, "clip": 0, "warmup_steps": 10}, "layout": LAYOUT},
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong",),
            ranks=frozenset(),
            remedy=(r"learning rate", r"learning_rate", r"\blr\b"),
            misleading=NODE_ACTIONS,
        ),
        onset="start",
        judge_seconds=90,
    ),
    LiveFault(
        name="batch-too-large",
        family="configuration",
        summary="The job was planned for more memory than its container has; a rank is killed in the first step.",
        source="https://github.com/LeapMind/MLF-SC/issues/41",
        job=JobRecipe(
            keys={"train": {"global_batch_sequences": 8192}, "layout": {"fsdp": 2, "micro_batch": 4096}},
            cgroups={"memory": {}},
        ),
        inject=limit_memory,
        expected=ExpectedVerdict(
            layers=("framework", "host"),
            conditions=("dead",),
            remedy=(r"micro[_-]?batch", r"batch size", r"smaller batch", r"\bmemory\b"),
            misleading=(r"\breboot\b", r"replace the node"),
        ),
        onset="start",
        judge_seconds=180,
        needs=("root", "cgroup:memory"),
    ),
    LiveFault(
        name="tokenizer-mismatch",
        family="configuration",
        summary="The data was made by a tokenizer of 1,024 tokens, the model has 512.",
        source="https://github.com/kongds/E5-V/issues/7",
        job=JobRecipe(
            keys={
                "data": {"path": None, "tokenizer": None, "source": "configuration:tokens"},
                "layout": LAYOUT,
            },
            program="configuration",
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("dead",),
            remedy=(r"vocab", r"token id", r"tokenizer", r"out of range"),
            misleading=NODE_ACTIONS,
        ),
        onset="start",
        judge_seconds=90,
    ),
    LiveFault(
        name="layout-for-other-nodes",
        family="configuration",
        summary="A script needs a multiple of four ranks for its tensor parallel size, and has two.",
        source="https://github.com/open-compass/VLMEvalKit/issues/561",
        job=_script("layout"),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("dead",),
            remedy=(r"AssertionError", r"divisible", r"tensor.*parallel", r"world size"),
            misleading=NODE_ACTIONS,
        ),
    ),
    LiveFault(
        name="world-size-mismatch",
        family="configuration",
        summary="A script waits for four ranks at its rendezvous, and only two were started.",
        source="https://github.com/pytorch/pytorch/issues/23074",
        job=_script("world-size"),
        expected=ExpectedVerdict(
            layers=("framework", "collective"),
            conditions=("hung", "starting"),
            ranks=frozenset(),
            remedy=(r"world[ _]size", r"rendezvous", r"init_process_group", r"wait.*(rank|peer)", r"stack"),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=60,
    ),
    LiveFault(
        name="port-in-use",
        family="configuration",
        summary="Another job on the node listens on the port of the script's rendezvous.",
        source="https://github.com/pytorch/pytorch/issues/73320",
        job=_script("port"),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("dead",),
            ranks=frozenset({0}),
            remedy=(r"address already in use", r"\bport\b", r"Errno 98"),
            misleading=NODE_ACTIONS,
        ),
    ),
    LiveFault(
        name="package-missing",
        family="configuration",
        summary="The module of a custom objective imports a package that the nodes do not have.",
        source="https://github.com/lm-sys/FastChat/issues/1664",
        job=JobRecipe(
            keys={"objective": "fused:loss", "layout": LAYOUT},
            files={
                "fused.py": "import flash_attn\n\n\ndef loss(log_probs, batch):\n"
                "    return flash_attn.fused_loss(log_probs, batch.weight), {}\n"
            },
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("dead",),
            remedy=(r"flash_attn", r"ModuleNotFoundError", r"\binstall\b"),
            misleading=NODE_ACTIONS,
        ),
        onset="start",
        judge_seconds=90,
    ),
    LiveFault(
        name="evaluates-too-often",
        family="configuration",
        summary="The run evaluates on 256 sequences after every step, so most of its time is evaluation.",
        source="https://github.com/tdrussell/qlora-pipe/pull/6",
        job=JobRecipe(
            keys={
                "data": {"validation": "{data}/validation.txt"},
                "train": {"evaluate": {"every_steps": 1, "sequences": 256}},
                "layout": LAYOUT,
            },
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("slow", "healthy"),
            ranks=frozenset(),
            remedy=(r"evaluat",),
            misleading=NODE_ACTIONS,
        ),
        onset="start",
        judge_seconds=120,
    ),
    LiveFault(
        name="checkpoints-too-often",
        family="configuration",
        summary="The run writes a checkpoint after every step, so most of its time is checkpoints.",
        source="https://github.com/deepchem/deepchem/issues/458",
        job=JobRecipe(
            keys={
                "model": {"layers": 4, "hidden": 256, "ffn_hidden": 1024},
                "checkpoint": {"tiers": [{"to": "shared", "every_steps": 1, "keep": 2}]},
                "layout": LAYOUT,
            },
        ),
        expected=ExpectedVerdict(
            layers=("framework", "storage"),
            conditions=("slow", "healthy"),
            ranks=frozenset(),
            remedy=(r"checkpoint.*(every|often|interval)", r"every_steps", r"(every|often|interval).*checkpoint"),
            misleading=NODE_ACTIONS,
        ),
        onset="start",
        judge_seconds=120,
    ),
)
