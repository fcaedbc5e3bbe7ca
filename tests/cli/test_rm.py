"""`craton rm`, and names that a failed start gives back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from run_verbs import Verbs, in_a_terminal

from craton.telemetry import RunDirectory


def ended(verbs: Verbs, name: str) -> RunDirectory:
    run = RunDirectory.create(verbs.root, name)
    run.launch_path.write_text('{"generation": 0, "nodes": ["node-0"], "ranks_per_node": 1, "command": ["x"]}')
    run.job_path.write_text(f"name: {name}\nkind: command\ncommand: ['true']\ncluster: local x 1\n")
    (run.checkpoints("shared") / "step-00000003").mkdir(parents=True)
    (run.checkpoints("shared") / "step-00000003" / "COMPLETE").write_text("{}")
    run.mark("DONE")
    return run


def test_rm_removes_what_it_named_and_follows_no_link(verbs: Verbs, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    first, second = ended(verbs, "first"), ended(verbs, "second")
    (first.path / "link").symlink_to(outside)
    refused = verbs("rm", "first")
    assert refused.returncode == 2
    assert "use --yes to remove" in refused.stderr
    assert first.path.exists()
    done = verbs("rm", "first", "second", "--yes")
    assert done.returncode == 0, done.stderr
    assert "1 checkpoint with it" in done.stdout
    assert "removed first, second" in done.stdout
    assert not first.path.exists()
    assert not second.path.exists()
    assert os.listdir(verbs.root) == []
    assert (outside / "kept").exists()
    assert verbs("rm", "first", "-y").returncode == 2


def test_rm_says_what_stays_elsewhere(verbs: Verbs, tmp_path: Path) -> None:
    run = ended(verbs, "tiered")
    saved = tmp_path / "tier" / "tiered"
    saved.mkdir(parents=True)
    run.job_path.write_text(
        "name: tiered\nkind: pretrain\nmodel: llama-3.2-1b\ndata: {path: stdlib, sequence: 1024}\n"
        "train: {global_batch_sequences: 8, steps: 3}\ncluster: local x 1\n"
        f"checkpoint: {{tiers: [{{to: {saved.parent}}}]}}\n"
    )
    [told] = verbs.json("rm", "tiered", "--yes")
    assert told["stays"] == [str(saved)]
    assert saved.exists()


def test_a_linked_run_loses_its_folder_and_its_link(verbs: Verbs, tmp_path: Path) -> None:
    run = ended(verbs, "far")
    run.path.rename(tmp_path / "far")
    (verbs.root / "far").symlink_to(tmp_path / "far")
    assert verbs("rm", "far", "--yes").returncode == 0
    assert not (tmp_path / "far").exists()
    assert not (verbs.root / "far").is_symlink()


def test_rm_asks(verbs: Verbs) -> None:
    run = ended(verbs, "asked")
    code, screen = in_a_terminal(verbs, ["rm", "asked"], when="Remove asked permanently?", send=b"n\r")
    assert code == 130
    assert "nothing was removed" in screen
    assert run.path.exists()
    code, _ = in_a_terminal(verbs, ["rm", "asked"], when="Remove asked permanently?", send=b"y\r")
    assert code == 0
    assert not run.path.exists()


def test_a_live_run_is_never_removed(verbs: Verbs) -> None:
    verbs("run", verbs.job(nodes=1, STEPS=100000), "--detach")
    verbs.wait_for_step(1)
    other = ended(verbs, "other")
    refused = verbs("rm", "other", "count", "--yes")
    assert refused.returncode == 2
    assert "count is not removed: count is running" in refused.stderr
    assert other.path.exists(), "nothing is removed where one is refused"
    verbs("stop", "count", "--now")
    assert verbs("rm", "count", "--yes").returncode == 0


def test_a_start_that_failed_before_anything_ran_gives_its_name_back(verbs: Verbs) -> None:
    job = verbs.folder / "count.yaml"
    job.write_text("kind: command\ncommand: [/absent/program]\ncluster: local x 1\nrecover: {tries: 0}\n")
    assert verbs("run", job).returncode == 1
    again = verbs("run", verbs.job(nodes=1, STEPS=2))
    assert again.returncode == 0, again.stderr
    taken = verbs("run", verbs.job(nodes=1, STEPS=2))
    assert taken.returncode == 2
    assert "already exists" in taken.stderr


def test_a_run_that_failed_after_a_step_keeps_its_name(verbs: Verbs) -> None:
    job = verbs.job(nodes=1, STEPS=1000, STEP_SECONDS=1.5, FAIL_RANK=0)
    job.write_text(job.read_text() + "recover: {tries: 0}\n")
    assert verbs("run", job).returncode == 1
    assert verbs("run", job).returncode == 2


@pytest.mark.parametrize("verb", ["logs", "why", "stop", "resume", "rm", "sample", "export"])
def test_a_name_of_5000_characters_is_bad_input(verbs: Verbs, verb: str) -> None:
    said = verbs(verb, "a" * 5000, *(["folder"] if verb == "export" else []))
    assert said.returncode == 2
    assert len(said.stderr) < 1000


def test_flags_have_no_type_in_the_help(verbs: Verbs) -> None:
    for verb in ("ps", "run", "logs"):
        said = verbs(verb, "--help").stdout
        assert "--json" in said
        assert "bool" not in said.lower()
