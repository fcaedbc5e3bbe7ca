"""A small training run on this machine, with any number of nodes and ranks, for fault injection.

It has agents, keepers, ranks and a ledger like any run. Only its model is small, its data needs no file, and a node may
have any number of ranks, on CPUs or all on one GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from craton.agent import Launch, write_launch
from craton.agent.processes import free_port
from craton.infrastructure import MEMORY_FRACTION, memory_fraction, nodes_per_gpu, visible_accelerators
from craton.job import dump_job, parse_job
from craton.job.layout import Layout
from craton.orchestration import agent_command, kill_agents, start_agents, with_cards
from craton.orchestration.draft import fork_server_command, rank_command
from craton.telemetry import RunDirectory

DENSE = "{layers: 4, hidden: 64, ffn_hidden: 128, heads: 4, kv_heads: 2, vocab: 64, tied_embeddings: true}"
EXPERTS = (
    "{layers: 4, hidden: 64, ffn_hidden: 128, heads: 4, kv_heads: 2, vocab: 64, tied_embeddings: true, "
    "experts: 4, top_k: 2, moe_ffn_hidden: 64}"
)


@dataclass(frozen=True)
class Rehearsal:
    """The settings of a rehearsal: model, ranks, and injected faults."""

    name: str
    nodes: int = 2
    ranks_per_node: int = 2
    layout: Mapping[str, Any] = field(default_factory=dict)  # empty: FSDP over all ranks
    model: str = DENSE
    steps: int = 60
    sequence: int = 32
    batch: int = 16
    checkpoint: str = "{peer: 1 steps, tiers: [{to: shared, every_steps: 20}]}"
    chaos: Sequence[str] = ()
    spares: int = 0
    min_nodes: int = 0
    layouts: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)  # for other numbers of nodes
    recover: str = "{}"
    environment: Mapping[str, str] = field(default_factory=dict)
    shares_gpus: bool = False  # nodes, with one rank each, share the GPUs of this machine; False: CPUs

    def job_text(self) -> str:
        return (
            f"name: {self.name}\nkind: pretrain\nmodel: {self.model}\n"
            f'data: {{source: "craton.ml.data.patterns:walks", sequence: {self.sequence}}}\n'
            f"train: {{global_batch_sequences: {self.batch}, steps: {self.steps}, precision: fp32, "
            "learning_rate: 3e-3}\n"
            f"cluster: local x {self.nodes}\ncheckpoint: {self.checkpoint}\nrecover: {self.recover}\n"
            f"run: {{share_gpus: {str(self.shares_gpus).lower()}}}\n"
        )


@contextmanager
def running(root: Path, rehearsal: Rehearsal) -> Iterator[RunDirectory]:
    """Run a rehearsal; end all its processes at the end of the block."""
    run, launch = write_rehearsal(root, rehearsal)
    start_agents(run, launch)
    try:
        yield run
    finally:
        end_rehearsal(run)


def end_rehearsal(run: RunDirectory) -> None:
    """End every process of the run at once."""
    if not run.has("DONE"):
        run.mark("STOP", "the rehearsal is over")
    kill_agents(run)


def write_rehearsal(root: Path, rehearsal: Rehearsal) -> tuple[RunDirectory, Launch]:
    """Write the run directory and launch file for the agents."""
    job = parse_job(rehearsal.job_text(), rehearsal.name)
    run = RunDirectory.create(root, rehearsal.name)
    world = rehearsal.nodes * rehearsal.ranks_per_node
    layout = dict(rehearsal.layout) or {"fsdp": world}
    by_nodes = {rehearsal.nodes: layout, **rehearsal.layouts}
    sharers, bounds = 1, {}
    if rehearsal.shares_gpus:
        cards = visible_accelerators()
        sharers = nodes_per_gpu(cards, rehearsal.nodes)
        bounds = {MEMORY_FRACTION: f"{memory_fraction(cards, sharers):.4f}"}
    launch = Launch(
        generation=0,
        nodes=[f"node-{number}" for number in range(rehearsal.nodes + rehearsal.spares)],
        ranks_per_node=rehearsal.ranks_per_node,
        command=rank_command(job, run.path),
        nursery=fork_server_command(job, run.path),
        agent_command=agent_command(run.path),
        env={**bounds, **rehearsal.environment},
        master_port=free_port(),
        num_nodes=rehearsal.nodes,
        min_nodes=rehearsal.min_nodes,
        layouts={str(count): asdict(Layout(**{"precision": "fp32", **item})) for count, item in by_nodes.items()},
        tries=job.recover.tries,
        spare_seconds=job.recover.spare_wait,
        give_up_seconds=job.recover.give_up,
        chaos=list(rehearsal.chaos),
        gpus=rehearsal.shares_gpus,
        nodes_per_gpu=sharers,
    )
    launch = with_cards(launch)
    run.job_path.write_text(dump_job(job), encoding="utf-8")
    write_launch(run, launch)
    return run, launch
