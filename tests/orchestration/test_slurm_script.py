"""What Slurm is told: golden scripts and commands, and values that could mean something else are refused."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from craton.job import ContentError, JobError, parse_job
from craton.orchestration import StartError
from craton.orchestration.draft import Draft, draft_run
from craton.orchestration.slurm import ScriptOptions, SlurmBackend, sbatch_script
from craton.orchestration.slurm.batch import MAX_EXCLUDED, avoided_hosts
from craton.orchestration.slurm.mounts import _whole_snapshot, image_of, mounts_of
from craton.orchestration.slurm.node import open_log
from craton.orchestration.slurm.script import duration, nonce_of, signal_seconds
from craton.orchestration.slurm.step import SlurmStep, agents_command, doctor_command
from craton.telemetry import RunDirectory

RUN = RunDirectory("/fsx/runs/llama")
NONCE = "0123456789abcdef"
PYTHON = ScriptOptions(python="/fsx/venv/bin/python", nonce=NONCE)
CLUSTER = """\
cluster:
  name: p5
  instance: p5.48xlarge
  nodes: 64
  levels: {{leaf: {{nodes: 16, switch: leaf}}, spine: {{nodes: 64, switch: spine}}}}
  scheduler: {{kind: slurm, partition: p5, account: lab{more}}}
  spares: {spares}
  take: {take}
"""


def job_text(take: object = 4, spares: int = 0, more: str = "", run: str = "", placement: str = "") -> str:
    return (
        "name: llama\nkind: command\ncommand: [python, train.py]\n"
        + CLUSTER.format(take=take, spares=spares, more=more)
        + (f"run: {{{run}}}\n" if run else "")
        + (f"placement: {placement}\n" if placement else "")
    )


def drafted(text: str) -> Draft:
    return draft_run(parse_job(text), RUN.path)


WHOLE = (
    "partition: p5-long, qos: research, gres: 'gpu:h100:8', constraint: 'h100&efa', reservation: block, "
    "exclude: [g3, 'g[7-9]'], time_limit: 2d, save_before: 15m"
)
SCRIPTS = {
    "whole": job_text(run=WHOLE, placement="{within: leaf, wait: 30m}"),
    "defaults": job_text(),
    "spares": job_text(take=6, spares=2, placement="{within: leaf}"),
    "elastic": job_text(take="2..8"),
    "two-leaves": job_text(take=32, placement="{within: spine}"),
    "block": job_text(take=16, more=", block_nodes: 16", placement="{within: leaf}"),
    "blocks": job_text(take=36, more=", block_nodes: 16", placement="{within: spine}"),
    "shared-nodes": job_text(run="exclusive: false"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_golden_scripts(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"slurm-{name}.sbatch", sbatch_script(drafted(SCRIPTS[name]), RUN, PYTHON))


def test_copies_are_an_array_of_runs_with_names_of_their_own(golden: Callable[[str, str], None]) -> None:
    draft = drafted(job_text(run="copies: 3"))
    options = ScriptOptions("/fsx/venv/bin/python", copies=3, nonce=NONCE)
    script = sbatch_script(draft, RunDirectory("/fsx/runs/llama-1"), options)
    golden("slurm-array.sbatch", script)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_is_one_that_a_shell_can_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / "job.sbatch"
    path.write_text(sbatch_script(drafted(SCRIPTS[name]), RUN, PYTHON))
    subprocess.run(["sh", "-n", str(path)], check=True)


def test_secrets_are_named_and_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    draft = drafted(job_text(run="secrets: [HF_TOKEN]"))
    script = sbatch_script(draft, RUN, PYTHON)
    assert "HF_TOKEN" in script
    assert "--export=ALL" in script
    for text in (script, *draft.files().values()):
        assert "hf_very_secret" not in text


HOSTILE = [
    "$(touch /tmp/owned)",
    "`id`",
    "a b",
    "p5\n#SBATCH --uid=0",
    "p5;rm -rf ~",
    'p5" --uid=0 "',
    "p5'",
    "p5#",
    "--uid=0",
    "\\n",
]


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("key", ["partition", "account", "qos", "gres", "constraint", "reservation", "exclude"])
def test_hostile_values_never_reach_the_script(key: str, value: str) -> None:
    job = parse_job(job_text())
    given = (value,) if key == "exclude" else value
    hostile = job.model_copy(update={"run": job.run.model_copy(update={key: given})})
    draft = draft_run(hostile, RUN.path)
    with pytest.raises(StartError, match=re.escape(f"run.{key} ")):
        sbatch_script(draft, RUN, PYTHON)


@pytest.mark.parametrize("name", ["a b", "$(id)", "x\ny", "../up", "-n"])
def test_a_job_cannot_even_be_called_so(name: str) -> None:
    with pytest.raises((ContentError, JobError)):
        parse_job(job_text().replace("name: llama", f"name: {name!r}", 1))


@pytest.mark.parametrize("folder", ["/fsx/a b", "/fsx/ünï"])
def test_a_path_with_blanks_stays_one_word(folder: str) -> None:
    script = sbatch_script(drafted(job_text()), RunDirectory(f"{folder}/llama"), PYTHON)
    assert f'#SBATCH --output="{folder}/llama/logs/slurm-%j.out"' in script
    assert shlex.split(script.splitlines()[-1])[-2:] == [f"{folder}/llama", NONCE]


@pytest.mark.parametrize("folder", ["/fsx/100%", '/fsx/"', "/fsx/$HOME", "/fsx/a\nb", "/fsx/a\\b", "/fsx/#1"])
def test_a_path_that_slurm_would_read_otherwise_is_refused(folder: str) -> None:
    with pytest.raises(StartError, match="CRATON_RUNS"):
        sbatch_script(drafted(job_text()), RunDirectory(f"{folder}/llama"), PYTHON)


def test_every_submission_has_a_nonce_of_its_own() -> None:
    scripts = [sbatch_script(drafted(job_text()), RUN) for _ in range(2)]
    first, second = map(nonce_of, scripts)
    assert len(first) == 16
    assert first != second
    assert shlex.split(scripts[0].splitlines()[-1])[-1] == first, "the batch program is told, too"
    assert nonce_of("#!/bin/sh\n") == ""


def test_the_check_is_of_the_path_that_the_run_will_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    backend, draft = SlurmBackend(), drafted(job_text())
    backend.check(draft, RUN)
    with pytest.raises(StartError, match=r"/fsx/100%.*CRATON_RUNS"):
        backend.check(draft, RunDirectory("/fsx/100%/llama"))


REFUSED_PLACEMENTS = {
    "more than a leaf": (
        job_text(take=20, placement="{within: leaf}"),
        "20 nodes do not fit on one leaf, which has 16",
    ),
    "many within one node": (job_text(placement="{within: node}"), "cannot be within one node"),
    "leaves of unknown size": (
        job_text(placement="{within: spine}").replace("leaf: {nodes: 16, switch: leaf}, ", ""),
        "levels: {leaf: {nodes: N}}",
    ),
}


@pytest.mark.parametrize("case", REFUSED_PLACEMENTS)
def test_a_placement_that_cannot_be_is_refused(case: str) -> None:
    text, words = REFUSED_PLACEMENTS[case]
    with pytest.raises(StartError, match=re.escape(words)):
        sbatch_script(drafted(text), RUN, PYTHON)


def test_the_signal_leaves_time_to_train() -> None:
    assert signal_seconds(parse_job(job_text(run="time_limit: 10m"))) == 300, "not all of it"
    assert signal_seconds(parse_job(job_text(run="time_limit: 1d"))) == 600
    assert signal_seconds(parse_job(job_text(run="save_before: 30d"))) == 65535, "as much as sbatch takes"


def test_durations_are_rounded_up_to_minutes() -> None:
    assert [duration(seconds) for seconds in (1, 61, 3600, 90061)] == [
        "0-00:01:00",
        "0-00:02:00",
        "0-01:00:00",
        "1-01:02:00",
    ]


STEPS = {
    "venv": SlurmStep(Path("/fsx/runs/llama"), "/fsx/venv/bin/python"),
    "pyxis": SlurmStep(Path("/fsx/runs/llama"), "/fsx/venv/bin/python", "/fsx/train.sqsh", ("/fsx", "/scratch"), True),
    "apptainer": SlurmStep(
        Path("/fsx/runs/llama"), "/fsx/venv/bin/python", "/images/train.sif", ("/fsx/runs", "/scratch"), True
    ),
    "hyperpod": SlurmStep(Path("/fsx/runs/llama"), "/fsx/venv/bin/python", gpus=True, auto_resume=True),
    "shared-nodes": SlurmStep(Path("/fsx/runs/llama"), "/fsx/venv/bin/python", cpus_per_task=12),
}


@pytest.mark.parametrize("name", STEPS)
def test_golden_steps(name: str, golden: Callable[[str, str], None]) -> None:
    import craton.orchestration.slurm.node as node_program

    commands = [
        agents_command(STEPS[name], ["g1", "g2"]),
        doctor_command(STEPS[name], ["g1", "g2"], Path("/fsx/runs/llama/preflight"), STEPS[name].gpus),
    ]
    text = "\n".join(shlex.join(words).replace(" --", " \\\n  --") for words in commands)
    golden(f"slurm-step-{name}.txt", text.replace(str(node_program.__file__), "/fsx/craton/node.py") + "\n")


TRAINING = """\
name: llama
kind: pretrain
model: {{name: tiny, layers: 2, hidden: 64, ffn_hidden: 128, heads: 4, kv_heads: 2, vocab: 64}}
data: {{path: '{data}', sequence: 32}}
train: {{global_batch_sequences: 12, steps: 10}}
checkpoint: {{tiers: [{{to: nvme, every_steps: 100}}]}}
cluster: {{name: lab, instance: local, nodes: 1, scheduler: {{kind: slurm}}, storage: {{nvme: {{path: /scratch}}}}}}
run: {{image: team/train.sqsh}}
"""


def mounted(data: str, folder: str = "/home/me/jobs", run: RunDirectory = RUN) -> tuple[str, ...]:
    launch = drafted(job_text()).launch
    return mounts_of(parse_job(TRAINING.format(data=data)), run, replace(launch, env={"CRATON_JOB_FOLDER": folder}))


def test_an_image_is_shown_what_the_job_needs() -> None:
    found = mounted("/data/tokens")
    assert found == ("/fsx/runs", "/scratch", "/home/me/jobs", "/data/tokens")
    assert mounted("/fsx/runs/../data") == ("/fsx/runs", "/scratch", "/home/me/jobs", "/fsx/data")
    assert mounted("/data", folder="/data/jobs") == ("/fsx/runs", "/scratch", "/data"), "once is enough"


def test_an_image_is_shown_reward_models() -> None:
    serve = "serve: {initialize: random, verifiers: {rm: {model: /models/rm}}}"
    job = parse_job(f"name: served\nkind: serve\nmodel: llama-3-8b\ncluster: local\n{serve}\n")
    assert "/models/rm" in mounts_of(job, RUN, drafted(job_text()).launch)


def test_an_image_is_shown_the_suites_of_a_training_and_their_problems(tmp_path: Path) -> None:
    suite = tmp_path / "suites" / "own.yaml"
    suite.parent.mkdir()
    suite.write_text("data: {path: /data/problems.jsonl}\nreward: exact\nverifiers: {rm: {model: /models/rm}}\n")
    launch = drafted(job_text()).launch
    for name, files in ((str(suite), {str(suite), "/data/problems.jsonl", "/models/rm"}), ("arithmetic", set())):
        evaluate = f"steps: 10, evaluate: {{every_steps: 5, suite: '{name}'}}}}"
        job = parse_job(TRAINING.format(data="/tokens").replace("steps: 10}", evaluate))
        assert set(mounts_of(job, RUN, replace(launch, env={}))) == {"/fsx/runs", "/scratch", "/tokens", *files}


def test_what_is_read_from_afar_is_kept_in_a_folder_that_an_image_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRATON_CACHE", "/fsx/cache")
    assert "/fsx/cache" in mounted("s3://bucket/tokens")


def test_weights_of_the_hub_are_shown_with_what_their_links_lead_to(tmp_path: Path) -> None:
    model = tmp_path / "models--team--tiny"
    snapshot = model / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    assert _whole_snapshot(snapshot) == model
    assert _whole_snapshot(tmp_path / "tiny") == tmp_path / "tiny"


IMAGES = {  # as written → as pyxis and Apptainer are told
    "team/train.sqsh": "/home/me/jobs/team/train.sqsh",
    "../train.sif": "/home/me/train.sif",
    "./train": "/home/me/jobs/train",
    "/fsx/images/train.sqsh": "/fsx/images/train.sqsh",
    "team/train:1": "team/train:1",
    "nvcr.io#nvidia/pytorch:25.10-py3": "nvcr.io#nvidia/pytorch:25.10-py3",
    "docker://team/train:1": "docker://team/train:1",
    "oras://team/train.sif": "oras://team/train.sif",
}


@pytest.mark.parametrize("written", IMAGES)
def test_an_image_that_is_a_file_is_told_by_its_whole_path(written: str) -> None:
    """pyxis would look for team/train.sqsh in a registry."""
    draft = drafted(job_text(run=f"image: '{written}'"))
    launch = replace(draft.launch, env={"CRATON_JOB_FOLDER": "/home/me/jobs"})
    assert image_of(draft.job, launch) == IMAGES[written]


@pytest.mark.parametrize(("data", "folder"), [("/data/a:b", "/jobs"), ("/data/a,b", "/jobs"), ("/data", "/usr")])
def test_what_an_image_cannot_be_shown_is_refused_by_name(data: str, folder: str) -> None:
    path = folder if folder == "/usr" else data
    with pytest.raises(StartError, match=re.escape(path)):
        mounted(data, folder)


def test_a_check_refuses_what_an_image_cannot_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    draft = drafted(job_text(run="image: team/train.sqsh"))
    hiding = replace(draft, launch=replace(draft.launch, env={"CRATON_JOB_FOLDER": "/"}))
    SlurmBackend().check(draft, RUN)
    with pytest.raises(StartError, match=r"/ cannot be mounted into the image /team/train\.sqsh"):
        SlurmBackend().check(hiding, RUN)


def test_what_a_user_excludes_is_never_forgotten_for_what_a_run_learns() -> None:
    own = [f"u{number}" for number in range(40)]
    learned = [f"g{number}" for number in range(40)]
    avoided = avoided_hosts(own, [*own, *learned, "g3"])
    assert avoided[:40] == own
    assert avoided[40:] == learned[-MAX_EXCLUDED:], "the newest of the others"
    assert avoided_hosts([], ["g1", "g2", "g1"]) == ["g1", "g2"]


@pytest.mark.parametrize("kind", ["FIFO", "link", "folder", "linked folder"])
def test_the_log_of_a_node_is_a_regular_file_or_slurms_own(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    logs, outside = tmp_path / "logs", tmp_path / "outside"
    outside.mkdir()
    log = logs / "agent-node-0.log"
    if kind == "linked folder":
        logs.symlink_to(outside)
    else:
        logs.mkdir()
        plants = {"FIFO": os.mkfifo, "link": lambda path: path.symlink_to(outside / "file"), "folder": os.mkdir}
        plants[kind](log)
    assert open_log(log) is None
    assert f"{log} " in capsys.readouterr().err
    assert list(outside.iterdir()) == []


def test_the_log_of_a_node_is_appended_to(tmp_path: Path) -> None:
    for line in (b"one\n", b"two\n"):
        descriptor = open_log(tmp_path / "agent.log")
        assert descriptor is not None
        os.write(descriptor, line)
        os.close(descriptor)
    assert (tmp_path / "agent.log").read_bytes() == b"one\ntwo\n"
