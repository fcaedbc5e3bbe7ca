"""Real training on a real Slurm: a node dies at once, a spare takes its place from the memory of its buddy, and the
losses are those of the same training on this machine.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from slurm_lab import SlurmLab
from slurm_runs import events_of, hosts_of, losses_of, no_code, submit, wait_for_run, wait_for_step

from craton.agent import newest_generation
from craton.job import Job, load_job, parse_job
from craton.orchestration import draft_run, free_port, prepare_data, start_run

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
STEPS = 30


def training(name: str, nodes: int, spares: int = 0) -> Job:
    return parse_job(
        f"name: {name}\nkind: pretrain\n"
        "model: {name: tiny, layers: 2, hidden: 64, ffn_hidden: 128, heads: 4, kv_heads: 2, vocab: 64, "
        "tied_embeddings: true}\n"
        'data: {source: "craton.ml.data.patterns:walks", sequence: 32}\n'
        f"train: {{global_batch_sequences: 12, steps: {STEPS}, precision: fp32, learning_rate: 3e-3}}\n"
        "checkpoint: {peer: 1 steps, tiers: [{to: shared, every_steps: 1000}]}\n"
        f"cluster: local x {nodes}\nlayout: {{fsdp: {nodes}}}\nrecover: {{spares: {spares}}}\n",
        folder=no_code(),
    )


def on_slurm(job: Job) -> Job:
    return job.model_copy(update={"run": job.run.model_copy(update={"on": "slurm", "gres": "gpu:8"})})


@pytest.mark.slow
def test_a_node_killed_is_replaced_by_a_spare_from_memory(root: Path, slurm: SlurmLab) -> None:
    """Four nodes, three of which train, beside the same training on this machine."""
    calm_job = training("calm", 3)
    calm = start_run(draft_run(calm_job, root / calm_job.name, port=free_port()), root)
    run = submit(root, on_slurm(training("killed", 3, spares=1)))
    wait_for_step(run, 8, 120)
    hosts = hosts_of(run)
    assert len(hosts) == 4
    present = newest_generation(run)
    assert present is not None
    slurm.kill_node(hosts[present.nodes[-1]])
    wait_for_run(run, "done", seconds=120)
    wait_for_run(calm, "done", seconds=120)
    assert losses_of(run)[STEPS] == losses_of(calm)[STEPS]
    assert losses_of(run) == losses_of(calm), "every step, to the last bit"
    (recovered,) = [event for event in events_of(run, "recovered") if event["rank"] == 0]
    assert recovered["restored_from"] == "peer"
    assert int(str(recovered["lost_steps"])) <= 1
    assert not events_of(run, "requeued"), "the job goes on in its own allocation"
    assert hosts_of(run) == hosts


@pytest.mark.slow
def test_the_quickstart_on_four_nodes_ends_as_it_does_here(root: Path, slurm: SlurmLab) -> None:
    job = load_job(QUICKSTART)
    four = job.model_copy(update={"cluster": job.cluster.model_copy(update={"num_nodes": 4}), "layout": None})
    draft, _ = prepare_data(draft_run(four, root / "quickstart", on="slurm", port=free_port()))
    run = start_run(draft, root)
    wait_for_run(run, "done", seconds=900)
    here, _ = prepare_data(draft_run(four.model_copy(update={"name": "here"}), root / "here", port=free_port()))
    calm = start_run(here, root)
    wait_for_run(calm, "done", seconds=900)
    assert losses_of(run)[job.steps or 0] == losses_of(calm)[job.steps or 0]
