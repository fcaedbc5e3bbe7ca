"""What Slurm is told: golden scripts and commands, and values that could mean something else are refused."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from craton.job import ContentError, JobError, parse_job
from craton.orchestration import Draft, StartError, draft_run
from craton.orchestration.slurm import ScriptOptions, sbatch_script
from craton.orchestration.slurm.script import duration, signal_seconds
from craton.orchestration.slurm.step import Step, agents_command, doctor_command
from craton.telemetry import RunDirectory

RUN = RunDirectory("/fsx/runs/llama")
PYTHON = ScriptOptions(python="/fsx/venv/bin/python")
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
    script = sbatch_script(draft, RunDirectory("/fsx/runs/llama-1"), ScriptOptions("/fsx/venv/bin/python", copies=3))
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
    assert shlex.split(script.splitlines()[-1])[-1] == f"{folder}/llama"


@pytest.mark.parametrize("folder", ["/fsx/100%", '/fsx/"', "/fsx/$HOME", "/fsx/a\nb", "/fsx/a\\b", "/fsx/#1"])
def test_a_path_that_slurm_would_read_otherwise_is_refused(folder: str) -> None:
    with pytest.raises(StartError, match="CRATON_RUNS"):
        sbatch_script(drafted(job_text()), RunDirectory(f"{folder}/llama"), PYTHON)


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
    "venv": Step(Path("/fsx/runs/llama"), "/fsx/venv/bin/python"),
    "pyxis": Step(Path("/fsx/runs/llama"), "/fsx/venv/bin/python", "team/train.sqsh", ("/fsx", "/scratch"), True),
    "apptainer": Step(Path("/fsx/runs/llama"), "/fsx/venv/bin/python", "/images/train.sif", ("/scratch",), True),
    "hyperpod": Step(Path("/fsx/runs/llama"), "/fsx/venv/bin/python", gpus=True, auto_resume=True),
    "shared-nodes": Step(Path("/fsx/runs/llama"), "/fsx/venv/bin/python", cpus_per_task=12),
}


@pytest.mark.parametrize("name", STEPS)
def test_golden_steps(name: str, golden: Callable[[str, str], None]) -> None:
    import craton.orchestration.slurm.node as node_program

    commands = [
        agents_command(STEPS[name], ["g1", "g2"]),
        doctor_command(STEPS[name], ["g1", "g2"], Path("/fsx/runs/llama/preflight"), "p5.48xlarge"),
    ]
    text = "\n".join(shlex.join(words).replace(" --", " \\\n  --") for words in commands)
    golden(f"slurm-step-{name}.txt", text.replace(str(node_program.__file__), "/fsx/craton/node.py") + "\n")
