"""Real training on a real Slurm: a node dies at once, a spare takes its place from the memory of its buddy, and the
losses are those of the same training on this machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from slurm_lab import SlurmLab
from slurm_runs import events_of, hosts_of, last_words, losses_of, no_code, submit, wait_for_run, wait_for_step

from craton.agent import newest_generation
from craton.agent.processes import free_port
from craton.job import Job, parse_job
from craton.orchestration.draft import draft_run
from craton.orchestration.start import start_run
from craton.telemetry import RunDirectory

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
    wait_for_step(run, 8)
    hosts = hosts_of(run)
    assert len(hosts) == 4
    present = newest_generation(run)
    assert present is not None
    slurm.kill_node(hosts[present.nodes[-1]])
    wait_for_run(run, "done")
    wait_for_run(calm, "done")
    assert losses_of(run)[STEPS] == losses_of(calm)[STEPS]
    assert losses_of(run) == losses_of(calm), "every step, to the last bit"
    (recovered,) = [event for event in events_of(run, "recovered") if event["rank"] == 0]
    assert recovered["restored_from"] == "peer"
    assert int(str(recovered["lost_steps"])) <= 1
    assert not events_of(run, "requeued"), "the job goes on in its own allocation"
    assert hosts_of(run) == hosts


@pytest.mark.slow
def test_the_quickstart_on_four_nodes_ends_as_it_does_here(root: Path, slurm: SlurmLab, tmp_path: Path) -> None:
    """As anybody would start it, in a process of its own: `craton run examples/quickstart.yaml --on slurm`, but with a
    tenth of its steps."""
    text = QUICKSTART.read_text()
    changes = {"local x 2": "local x 4", "{fsdp: 2, micro_batch: 4}": "{fsdp: 4, micro_batch: 2}"}
    for old, new in {**changes, "steps: 400": "steps: 40", "every_steps: 80": "every_steps: 20"}.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    job = tmp_path / "quickstart.yaml"
    job.write_text(text)
    ended = {}
    for name, on in {"quickstart": "slurm", "here": "local"}.items():
        words = [sys.executable, "-m", "craton", "run", str(job), "--on", on, "--name", name, "--json"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
        run = RunDirectory(root / name)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}{last_words(run)}"
        ended[name] = json.loads(done.stdout)
        assert (ended[name]["state"], ended[name]["step"]) == ("done", 40)
        assert ended[name]["loss"] == losses_of(run)[40]
    assert len(hosts_of(RunDirectory(root / "quickstart"))) == 4
    assert ended["quickstart"]["loss"] == ended["here"]["loss"]
