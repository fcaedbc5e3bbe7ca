"""Wall clocks of nodes, fifth set: missed evaluations, an elapsed time of 0, a late start, folders of the hour, the
year 2040."""

from __future__ import annotations

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.node_clocks import CLOCK, HOUR, NEEDS, drift, jump, with_clocks

PROGRAM = "fifth_clocks"
MISLEADING = (r"add memory|out of memory|learning rate",)
YEAR = 365.25 * 24 * HOUR


def _script(fault: str, nodes: int) -> JobRecipe:
    return JobRecipe(
        kind="command",
        nodes=nodes,
        keys={
            "command": ["{python}", f"{PROGRAM}.py"],
            "progress": {"pattern": "step {step} loss {loss}", "hang": "15m"},
        },
        program=PROGRAM,
        fault=fault,
        prepare=with_clocks(),
    )


FAULTS = (
    LiveFault(
        name="clock-ahead-catches-up-evaluations",
        family="clocks",
        summary="The clock of node-1 jumps an hour ahead; the objective there catches up 720 missed evaluations.",
        source="https://github.com/node-schedule/node-schedule/issues/431",
        job=JobRecipe(
            keys={"objective": f"{PROGRAM}:objective", "layout": {"fsdp": 2, "micro_batch": 4}},
            program=PROGRAM,
            fault="evaluations",
            prepare=with_clocks(),
        ),
        inject=jump(1, seconds=HOUR),
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("hung", "slow", "dead"),
            ranks=frozenset({1}),
            node="node-1",
            remedy=(*CLOCK, r"evaluate_if_due|evaluat|objective|sleep|stack|py-spy|fifth_clocks"),
            misleading=MISLEADING,
        ),
        judge_seconds=30,
        needs=NEEDS,
    ),
    LiveFault(
        name="clock-still-divides-by-zero",
        family="clocks",
        summary="The clock of node-0 stands still; its data source divides by an elapsed time of 0 and raises.",
        source="https://github.com/karpathy/nanoGPT/pull/446",
        job=JobRecipe(
            keys={
                "data": {"path": None, "tokenizer": None, "source": f"{PROGRAM}:from_service"},
                "layout": {"replicate": 2, "micro_batch": 4},
            },
            program=PROGRAM,
            fault="speed",
            prepare=with_clocks(),
        ),
        inject=drift(0, rate=-1.0),
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("dead",),
            ranks=frozenset({0}),
            node="node-0",
            remedy=(*CLOCK, r"ZeroDivisionError|by zero|elapsed"),
            misleading=MISLEADING,
        ),
        judge_seconds=25,
        needs=NEEDS,
    ),
    LiveFault(
        name="clock-ahead-sets-a-late-start",
        family="clocks",
        summary="The clock of node-0 jumps half an hour ahead; rank 0 says when to go on, and the others wait for it.",
        source="https://github.com/cockroachdb/cockroach/issues/12655",
        job=_script("rounds", nodes=3),
        inject=jump(0, seconds=HOUR / 2),
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("hung", "dead"),
            ranks=frozenset({0}),
            node="node-0",
            remedy=(*CLOCK, r"begin_round|sleep|stack|py-spy|fifth_clocks"),
            misleading=MISLEADING,
        ),
        judge_seconds=30,
        needs=NEEDS,
    ),
    LiveFault(
        name="clock-ahead-names-another-folder",
        family="clocks",
        summary="The clock of node-1 jumps three hours ahead; rank 1 looks for samples in a folder of another hour.",
        source="https://github.com/tier4/Diffusion-Planner/pull/429",
        job=_script("folders", nodes=2),
        inject=jump(1, seconds=3 * HOUR),
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("dead",),
            ranks=frozenset({1}),
            node="node-1",
            remedy=(*CLOCK, r"FileNotFoundError|No such file|samples-2"),
            misleading=MISLEADING,
        ),
        judge_seconds=25,
        needs=NEEDS,
    ),
    LiveFault(
        name="clock-in-2040-overflows",
        family="clocks",
        summary="The clock of node-1 jumps 14 years ahead; its time does not fit into the 32 bits of a record.",
        source="https://github.com/micropython/micropython-lib/issues/842",
        job=JobRecipe(
            kind="sft",
            keys={
                "objective": f"{PROGRAM}:objective",
                "train": {"lora": {"rank": 4}},
                "layout": {"fsdp": 2},
            },
            program=PROGRAM,
            fault="records",
            prepare=with_clocks(),
        ),
        inject=jump(1, seconds=14 * YEAR),
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("dead",),
            ranks=frozenset({1}),
            node="node-1",
            remedy=(*CLOCK, r"struct\.error|format requires|2038|2147483647|overflow|note_record"),
            misleading=MISLEADING,
        ),
        judge_seconds=25,
        needs=NEEDS,
    ),
)
