"""What a user sees of a run whose last state no disk takes, and how it is found again: a real run and full disks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from run_verbs import Verbs
from waiting import wait_until

from craton.orchestration import living_agents
from craton.telemetry import summarize

JOB = """\
name: words
kind: pretrain
model: {{name: tiny, layers: 1, hidden: 32, ffn_hidden: 32, heads: 2, vocab: 300, tied_embeddings: true}}
data: {{path: text.jsonl, tokenizer: "bpe:300", sequence: 16}}
train: {{global_batch_sequences: 6, steps: 100000, precision: fp32, learning_rate: 1e-2}}
cluster: local x 1
checkpoint: {{tiers: [{{to: {disk}}}]}}
"""


@pytest.fixture
def words(verbs: Verbs, monkeypatch: pytest.MonkeyPatch, small_disk: Path) -> Path:
    """A job file of a real, tiny model whose only tier is full."""
    monkeypatch.setenv("CRATON_CACHE", str(verbs.folder / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    texts = [f"cat {number} sat on the mat and dog {number} ran to the man" for number in range(300)]
    (verbs.folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (small_disk / "other").write_bytes(bytes(1_000_000))
    job = verbs.folder / "words.yaml"
    job.write_text(JOB.format(disk=small_disk))
    return job


@pytest.mark.slow
def test_a_state_that_no_disk_takes_is_reported_kept_and_found_again(
    verbs: Verbs, words: Path, small_disk: Path
) -> None:
    started = verbs("run", words, "--detach")
    assert started.returncode == 0, started.stderr
    assert "saved only at the end and at a stop" in started.stdout
    verbs.wait_for_step(3, "words")
    run = verbs.run("words")
    rescue = run.path / "checkpoints" / "rescue"
    rescue.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(rescue)], check=True)
    try:
        stopped = verbs("stop", "words")
        assert stopped.returncode == 1, stopped.stdout
        assert "words is not stopped: the state of step" in stopped.stdout
        assert f"tier {small_disk} is full: the save needs " in stopped.stdout
        assert f"the run directory ({rescue}) is full: the save needs " in stopped.stdout
        assert "it is saved within 10 s once there is space" in stopped.stdout
        assert stopped.stdout.count("free space there") == 1
        assert "craton stop words --now" in stopped.stdout
        assert "only in memory" in verbs("ps").stdout
        why = verbs.json("why", "words")
        assert (why["cause"], why["layer"]) == ("state_unsaved", "storage")
        assert verbs.json("stop", "words", code=1)["unsaved"]
    finally:
        subprocess.run(["umount", str(rescue)], check=True)
    wait_until(lambda: summarize(run).state == "stopped")
    wait_until(lambda: not living_agents(run))
    step = summarize(run).step
    assert [path.name for path in rescue.iterdir()] == [f"step-{step:08d}"]

    place, reason = rescue / f"step-{step:08d}", f"not in its tier: tier {small_disk} is full: the save needs "
    again = verbs("stop", "words")
    assert again.returncode == 0
    at = f"its state is saved at {place.relative_to(verbs.folder)}"
    assert f"words already stopped after step {step:,}; {at}, {reason}" in again.stdout
    assert again.stdout.endswith("; `craton resume words` continues it\n")
    why = verbs("why", "words").stdout
    assert f"; its state of step {step:,} is in {place}, {reason}" in why

    exported = verbs("export", "words", verbs.folder / "model")
    assert exported.returncode == 0, exported.stderr
    assert f"step {step} of words" in exported.stdout

    (small_disk / "other").unlink()
    assert verbs("resume", "words", "--detach").returncode == 0
    wait_until(lambda: (small_disk / "words" / f"step-{step:08d}" / "COMPLETE").exists())
    verbs.wait_for_step(step + 2, "words")
    stopped = verbs("stop", "words")
    assert stopped.returncode == 0
    assert f"checkpoint of step {summarize(run).step:,} saved" in stopped.stdout
    assert "rescue" not in stopped.stdout
    assert not list(rescue.iterdir()), "the tier has what was rescued"
