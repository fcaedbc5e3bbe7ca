"""`chaos`, `resize` and `resume` after the worst: on real training runs, and every mistake one line."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from run_verbs import Verbs
from waiting import PATIENCE_SECONDS, wait_until

from craton import Run
from craton.agent import newest_generation
from craton.orchestration import RunStateError, living_agents
from craton.telemetry import summarize

# Steps of the tier are steps of the peer copies, too: these are never older.
JOB = """\
name: words
kind: pretrain
model: {name: tiny, layers: 1, hidden: 32, ffn_hidden: 32, heads: 2, vocab: 300, tied_embeddings: true}
data: {path: text.jsonl, tokenizer: "bpe:300", sequence: 16}
train: {global_batch_sequences: 6, steps: 100000, precision: fp32, learning_rate: 1e-2}
cluster: local x 2
checkpoint: {peer: 7 steps, tiers: [{to: shared, every_steps: 49, keep: 2}]}
"""
COMMAND = """\
name: loop
kind: command
command: "i=0; while true; do i=$((i+1)); echo step $i; sleep 0.05; done"
progress: {pattern: "step {step}"}
cluster: local x 1
"""
LONG = {"STEPS": 100_000}


@pytest.fixture
def words(verbs: Verbs, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job file of a real, tiny model that trains on and on."""
    monkeypatch.setenv("CRATON_CACHE", str(verbs.folder / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    texts = [f"cat {number} sat on the mat and dog {number} ran to the man" for number in range(300)]
    (verbs.folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    job = verbs.folder / "words.yaml"
    job.write_text(JOB)
    return job


def steps_of(verbs: Verbs) -> list[tuple[int, int]]:
    """(generation, step) of every step that rank 0 has recorded, in the order of time."""
    lines: list[dict[str, Any]] = []
    for path in sorted((verbs.root / "words" / "metrics").glob("*.jsonl")):
        lines += [json.loads(line) for line in path.read_text().splitlines()]
    found = [line for line in lines if line.get("rank") == 0 and "run_loss" in line]
    return [(line["generation"], line["step"]) for line in sorted(found, key=lambda line: line["time"])]


def test_chaos_breaks_and_the_run_comes_back_and_goes_on_with_another_size(verbs: Verbs, words: Path) -> None:
    started = verbs("run", words, "--detach")
    assert started.returncode == 0, started.stderr
    verbs.wait_for_step(8, "words")
    broken = verbs.json("chaos", "words", "--kill", "rank=1", "--yes", "--wait")
    assert (broken["fired"], broken["not_fired"]) == (["kill rank=1"], [])
    recovery = broken["recoveries"][0]
    assert recovery["restored_from"] == "peer"
    assert recovery["lost_steps"] is not None
    assert "rank 1 on node-1 was killed" in recovery["text"]
    assert "back after" in recovery["text"]
    listed = verbs("ps").stdout
    assert "words: 1 recovery: rank 1 on node-1 was killed" in listed
    assert "goodput" in listed
    assert "productive" in listed
    assert verbs.json("ps")[0]["recoveries"][0]["generation"] == recovery["generation"]

    refused = verbs("resize", "words", "5")
    assert refused.returncode == 2
    assert "words cannot run on 5 nodes" in refused.stderr
    assert "possible: 4 or 6" in refused.stderr
    assert "already runs on 2 nodes" in verbs("resize", "words", "2").stderr
    grown = verbs("resize", "words", "3")
    assert grown.returncode == 0, grown.stdout + grown.stderr
    assert "from 2 to 3 nodes" in grown.stdout
    assert "started the agent of node-2" in grown.stdout
    newest = newest_generation(verbs.run("words"))
    assert newest is not None
    assert (len(newest.nodes), newest.is_planned) == (3, True)
    assert json.loads((verbs.root / "words" / "plan.json").read_text())["cluster"]["num_nodes"] == 3
    handle = Run("words")
    with pytest.raises(RunStateError, match="words already runs on 3 nodes"):
        handle.resize(3)
    summary = handle.resize(1, PATIENCE_SECONDS)
    assert (summary.state, summary.ranks) == ("running", 1)
    newest = newest_generation(verbs.run("words"))
    assert newest is not None
    assert len(newest.nodes) == 1
    steps = steps_of(verbs)
    for number in (recovery["generation"] + 1, recovery["generation"] + 2):
        kept = restored_step(verbs, number)
        assert kept >= max(step for generation, step in steps if generation == number - 1), "a resize repeats no step"
        assert min(step for generation, step in steps if generation == number) == kept + 1, "and leaves none out"


@pytest.mark.slow
def test_a_size_that_the_named_layout_does_not_fit_gets_another_layout(verbs: Verbs, words: Path) -> None:
    words.write_text(JOB.replace("cluster: local x 2", "cluster: local x 2\nlayout: {fsdp: 2, micro_batch: 1}"))
    started = verbs("run", words, "--detach")
    assert started.returncode == 0, started.stderr
    verbs.wait_for_step(2, "words")
    resized = verbs("resize", "words", "1")
    assert resized.returncode == 0, resized.stdout + resized.stderr
    assert "words: from 2 to 1 node" in resized.stdout
    assert verbs("stop", "words").returncode == 0
    resumed = verbs("resume", "words", "--detach")
    assert resumed.returncode == 0, resumed.stderr
    assert "1 rank on 1 node" in resumed.stdout


def restored_step(verbs: Verbs, generation: int) -> int:
    """The step whose state a generation began with."""
    lines: list[dict[str, Any]] = []
    for path in sorted((verbs.root / "words" / "events").glob("*.jsonl")):
        lines += [json.loads(line) for line in path.read_text().splitlines()]
    found = [line["step"] for line in lines if line["event"] == "restored" and line["generation"] == generation]
    assert len(found) == 1
    return int(found[0])


def test_a_dry_run_shows_the_sizes_of_an_elastic_job(verbs: Verbs, words: Path) -> None:
    words.write_text(JOB.replace("local x 2", "local x 1..3"))
    files = verbs.json("run", words, "--dry-run")["files"]
    assert [name for name in files if name.startswith("plans/")] == ["plans/1.json", "plans/2.json", "plans/3.json"]
    assert list(json.loads(files["launch.json"])["layouts"]) == ["1", "2", "3"]


@pytest.mark.slow
def test_resume_goes_on_with_no_words_after_everything_was_killed(verbs: Verbs, words: Path) -> None:
    started = verbs("run", words, "--detach")
    assert started.returncode == 0, started.stderr
    verbs.wait_for_step(52, "words")
    run = verbs.run("words")
    for pid in processes_of(run.path):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not living_agents(run))
    before = summarize(run).step
    assert verbs("resume", "words", "--detach").returncode == 0
    verbs.wait_for_step(before + 2, "words")
    generations = steps_of(verbs)
    resumed = [step for generation, step in generations if generation == generations[-1][0]]
    assert resumed[0] > 49, "it went on from a checkpoint"
    verbs("stop", "words", "--now")
    wait_until(lambda: not processes_of(run.path))


def processes_of(run: Path) -> list[int]:
    """Every process whose environment or command names this run: agents, fork servers, keepers, ranks."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            told = (folder / "environ").read_bytes() + (folder / "cmdline").read_bytes()
            alive = (folder / "stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
        except OSError:
            continue
        is_ours = f"CRATON_RUN={run}\0".encode() in told or f"craton.agent\0{run}\0".encode() in told
        if alive and is_ours and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


def test_a_command_is_killed_at_a_step_of_its_output(verbs: Verbs) -> None:
    job = verbs.folder / "loop.yaml"
    job.write_text(COMMAND)
    assert verbs("run", job, "--detach").returncode == 0
    verbs.wait_for_step(3, "loop")
    step = summarize(Run(verbs.root / "loop").directory).step + 50
    broken = verbs.json("chaos", "loop", "--kill", f"rank=0@step={step}", "--yes", "--wait")
    assert broken["fired"] == [f"kill rank=0@step={step}"]
    generation = newest_generation(Run(verbs.root / "loop").directory)
    assert generation is not None
    assert "was killed by SIGKILL from `craton chaos`" in generation.reason
    spun = verbs("chaos", "loop", "--hang", "rank=0,how=spin", "--yes")
    assert (spun.returncode, "this run is a command" in spun.stderr) == (2, True)
    verbs("stop", "loop", "--now")


def test_chaos_says_what_it_does_and_refuses_what_cannot_happen(verbs: Verbs) -> None:
    verbs("run", verbs.job(**LONG), "--detach")
    verbs.wait_for_step(2)
    asked = verbs("chaos", "count", "--kill", "rank=1@step=90000", "--lose-node", "node-1@step=90001")
    assert asked.returncode == 2
    assert "CHAOS: 2 faults for run count" in asked.stdout
    assert "at step 90,000, rank 1 is killed (SIGKILL)" in asked.stdout
    assert "node-1 is lost for good" in asked.stdout
    assert "use --yes to confirm" in asked.stderr
    assert not list((verbs.root / "count" / "chaos").glob("*.json")), "nothing was armed"
    armed = verbs.json("chaos", "count", "--kill", "rank=1@step=90000", "--yes")
    assert armed["faults"] == ["kill rank=1@step=90000"]
    order = json.loads(Path(armed["order"]).read_text())
    assert order["faults"] == armed["faults"]
    assert order["by"]
    refused = {
        ("--kill", "rank=7"): "the ranks are 0 to 1",
        ("--kill", "rank=1@step=1"): "is past",
        ("--kil", "rank=1"): "--kill",
        ("--fail", "rank=1"): "this run is a command",
        ("--corrupt", "tier=peer"): "this run is a command",
        ("--lose-node", "node-9"): "the nodes are node-0, node-1",
        ("--kinds", "kill"): "requires --random",
        (): "no fault given",
    }
    for arguments, words in refused.items():
        result = verbs("chaos", "count", *arguments, "--yes")
        assert result.returncode == 2
        assert words in result.stderr
    resized = verbs("resize", "count", "3")
    assert resized.returncode == 2
    assert "craton resume count --cluster 'local x 3'" in resized.stderr
    assert verbs("stop", "count", "--now").returncode == 0
    for verb in (("chaos", "count", "--kill", "rank=0", "--yes"), ("resize", "count", "2")):
        ended = verbs(*verb)
        assert ended.returncode == 2
        assert "is not running" in ended.stderr


def test_stop_now_ends_agents_that_other_agents_started(verbs: Verbs) -> None:
    verbs("run", verbs.job(**LONG), "--detach")
    verbs.wait_for_step(2)
    run = verbs.run()
    first = {agent.node: agent.pid for agent in living_agents(run)}
    os.kill(first["node-1"], signal.SIGKILL)
    wait_until(lambda: {agent.node for agent in living_agents(run)} == {"node-0"})
    wait_until(lambda: {agent.node for agent in living_agents(run)} == {"node-0", "node-1"})
    assert verbs("stop", "count", "--now").returncode == 0
    assert living_agents(run) == []
    wait_until(lambda: not processes_of(run.path))
    assert verbs.json("ps")[0]["state"] == "stopped"
