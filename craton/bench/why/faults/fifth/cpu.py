"""Faults of CPUs, fifth set: half precision, a storm of signals, histograms, a hash per sample, missing cores."""

from __future__ import annotations

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault

PROGRAM = "fifth_cpu"
OBJECTIVE = {"objective": f"{PROGRAM}:objective"}
MISLEADING = (r"network|fabric|file system|learning rate",)
CPU = r"\bCPU|contention|load|cores?\b"
OWN_CODE = r"objective|fifth_cpu|program|py-spy|stack|profil|compute"

FAULTS = (
    LiveFault(
        name="cpu-half-precision-emulated",
        family="cpu",
        summary="A LoRA fine-tuning turns its score to fp16, for which the CPU has no fast kernel: 200 times as slow.",
        source="https://github.com/pytorch/pytorch/issues/146508",
        job=JobRecipe(
            kind="sft",
            keys={**OBJECTIVE, "train": {"lora": {"rank": 4}}, "layout": {"replicate": 2, "micro_batch": 4}},
            program=PROGRAM,
            fault="half",
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("slow",),
            ranks=frozenset(),
            remedy=(OWN_CODE, r"half|fp16|float16|precision|forward|matmul"),
            misleading=MISLEADING,
        ),
        judge_seconds=35,
    ),
    LiveFault(
        name="cpu-storm-of-signals",
        family="cpu",
        summary="A sampling profiler interrupts rank 1 by a timer every 0.2 ms, and needs longer for a stack.",
        source="https://github.com/tmm1/stackprof/issues/123",
        job=JobRecipe(
            keys={**OBJECTIVE, "layout": {"tp": 2, "micro_batch": 8}}, program=PROGRAM, fault="samples", victim=1
        ),
        expected=ExpectedVerdict(
            layers=("framework", "host"),
            conditions=("slow", "hung"),
            ranks=frozenset({1}),
            node="node-1",
            remedy=(r"signal|SIGALRM|timer|interrupt|handler|sampling", OWN_CODE, CPU),
            misleading=MISLEADING,
        ),
        judge_seconds=35,
    ),
    LiveFault(
        name="cpu-histograms-in-every-step",
        family="cpu",
        summary="Rank 0 writes histograms of its layers for a dashboard in every step instead of every thousand.",
        source="https://github.com/deepmodeling/deepmd-kit/pull/996",
        job=JobRecipe(
            keys={**OBJECTIVE, "layout": {"fsdp": 2, "micro_batch": 4}}, program=PROGRAM, fault="histograms", victim=0
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("slow",),
            ranks=frozenset({0}),
            node="node-0",
            remedy=(OWN_CODE, r"histogram"),
            misleading=MISLEADING,
        ),
        judge_seconds=35,
    ),
    LiveFault(
        name="cpu-index-hashed-for-each-sample",
        family="cpu",
        summary="The source of rank 1 lost its cache key and hashes its whole index of 48 MiB for each sample.",
        source="https://github.com/huggingface/datasets/pull/7533",
        job=JobRecipe(
            nodes=3,
            keys={
                "data": {"path": None, "tokenizer": None, "source": f"{PROGRAM}:samples"},
                "train": {"global_batch_sequences": 6},
                "layout": {"replicate": 3},
            },
            program=PROGRAM,
            victim=1,
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("slow",),
            ranks=frozenset({1}),
            node="node-1",
            remedy=(
                r"data[._ ]?source|data ?load|wait(s|ing)? for (its |the )?data|input pipeline|fifth_cpu",
                r"hash|py-spy|stack|profil",
            ),
            misleading=MISLEADING,
        ),
        judge_seconds=35,
    ),
    LiveFault(
        name="cpu-bound-to-missing-cores",
        family="cpu",
        summary="A script binds rank 1 to cores 32 to 63 of the machine that it was written for: invalid argument.",
        source="https://github.com/alibaba/yalantinglibs/issues/1215",
        job=JobRecipe(
            kind="command",
            keys={
                "command": ["{python}", f"{PROGRAM}.py"],
                "progress": {"pattern": "step {step} loss {loss}", "hang": "15m"},
            },
            program=PROGRAM,
        ),
        expected=ExpectedVerdict(
            layers=("framework", "host"),
            conditions=("dead",),
            ranks=frozenset({1}),
            remedy=(r"sched_setaffinity|affinity|Errno 22|Invalid argument|cores?\b|cpuset|fifth_cpu",),
            misleading=MISLEADING,
        ),
    ),
)
