"""Jobs of kind command: what is started, in which folder, and the same again after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
from counting import start, wait_for_state

from craton.job import ContentError, Job, check_job, parse_job
from craton.job.sections.command import starts_own_ranks
from craton.orchestration import StartError
from craton.orchestration.draft import draft_run
from craton.orchestration.start.runs import draft_resume, resume_run, resumed_job
from craton.orchestration.watching import wait_for_agents
from craton.telemetry import RunDirectory, summarize

RUN = Path("/runs/job")
TORCHRUN = "[torchrun, '--nnodes={num_nodes}', train.py]"


def job_text(command: str, more: str = "", cluster: str = "p5.48xlarge x 1") -> str:
    return f"name: mine\nkind: command\ncommand: {command}\ncluster: {cluster}\n{more}"


@pytest.mark.parametrize(
    ("command", "is_launcher"),
    [
        (("torchrun", "train.py"), True),
        (("/opt/venv/bin/accelerate", "launch", "x.py"), True),
        (("python3", "-m", "torch.distributed.run", "x.py"), True),
        (("python", "-m", "sglang.launch_server"), True),
        (("python", "-u", "-m", "vllm.entrypoints.openai.api_server"), True),
        (("A=1 exec vllm serve model",), True),
        (("python", "train.py", "torchrun"), False),
        (("python", "-m", "mine.torchrun"), False),
        (("python -m 'unclosed",), False),
        (("python", "-m"), False),
        (("",), False),
    ],
)
def test_a_command_that_starts_its_own_ranks_is_known(command: tuple[str, ...], is_launcher: bool) -> None:
    assert starts_own_ranks(command) is is_launcher


@pytest.mark.parametrize(
    ("command", "more", "ranks_per_node"),
    [(TORCHRUN, "", 1), ("[python, train.py]", "", 8), (TORCHRUN, "processes: gpu\n", 8), ("x", "processes: 3\n", 3)],
)
def test_how_many_processes_a_node_gets(command: str, more: str, ranks_per_node: int) -> None:
    launch = draft_run(parse_job(job_text(command, more)), RUN).launch
    assert (launch.ranks_per_node, launch.gpus_per_node, launch.node_gpus) == (ranks_per_node, 8, 8)
    assert launch.exits_together
    assert launch.workdir == "/runs/job/code"
    assert launch.env["JAX_COORDINATOR_ADDRESS"] == "{master_address}:{master_port}"


@pytest.mark.parametrize(
    ("command", "more", "device"),
    [
        ("[python, train.py]", "", "{local_rank}"),
        ("[python, train.py]", "processes: 8\n", "{local_rank}"),
        ("[python, train.py]", "processes: 4\n", None),
        (TORCHRUN, "", None),
        ("[python, train.py]", "run: {env: {JAX_LOCAL_DEVICE_IDS: '7'}}\n", "7"),
    ],
)
def test_a_process_of_jax_for_each_gpu_takes_its_own(command: str, more: str, device: str | None) -> None:
    launch = draft_run(parse_job(job_text(command, more)), RUN).launch
    assert launch.env.get("JAX_LOCAL_DEVICE_IDS") == device


def test_jax_without_gpus_is_told_of_none() -> None:
    job = parse_job(job_text("[python, train.py]", "processes: 2\n", "local x 1"))
    assert "JAX_LOCAL_DEVICE_IDS" not in draft_run(job, RUN).launch.env


@pytest.mark.parametrize(
    ("command", "more", "cluster", "last"),
    [
        ("[python, x.py]", "", "p5.48xlarge x 2", 15),
        (TORCHRUN, "", "p5.48xlarge x 2", 1),
        ("x", "processes: 3\n", "local x 2", 5),
        ("x", "processes: 3\n", "local x 2..4", 5),
    ],
)
def test_progress_of_a_rank_that_is_never_there_is_refused(command: str, more: str, cluster: str, last: int) -> None:
    def job_of(rank: int) -> Job:
        return parse_job(job_text(command, f"{more}progress: {{pattern: '{{step}}', rank: {rank}}}\n", cluster))

    num_gpus, on = (16, "slurm") if cluster.startswith("p5") else (2, "local")
    check_job(job_of(last), num_gpus)
    assert draft_run(job_of(last), RUN, on=on).launch.progress["rank"] == last
    text = rf"job.yaml:\d: progress.rank: there is no rank {last + 1}; give one from 0 to {last}$"
    with pytest.raises(ContentError, match=text):
        check_job(job_of(last + 1), num_gpus)
    with pytest.raises(StartError, match=text):
        draft_run(job_of(last + 1), RUN, on=on)


def test_how_many_gpus_this_machine_has_is_not_known_to_a_check() -> None:
    check_job(parse_job(job_text("x", "progress: {pattern: '{step}', rank: 7}\n", "local x 1")), 1)


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        ("'cd x && torchrun train.py'", "torchrun"),
        ("[bash, -c, 'torchrun train.py']", "torchrun"),
        ("[uv, run, torchrun, train.py]", "torchrun"),
        ("'source env; /opt/bin/accelerate launch train.py'", "/opt/bin/accelerate"),
        ("[uv, run, python, -m, torch.distributed.run, train.py]", "torch.distributed.run"),
        ("[python, train.py, --rollout, vllm]", "vllm"),
    ],
)
def test_a_launcher_that_is_hidden_in_a_command_needs_a_word(command: str, launcher: str) -> None:
    with pytest.raises(
        ContentError, match=rf"job.yaml:3: command: it is unclear whether {launcher} in it .* `processes: node`"
    ):
        parse_job(job_text(command))
    launch = draft_run(parse_job(job_text(command, "processes: node\n")), RUN).launch
    assert (launch.ranks_per_node, launch.exits_together) == (1, True)
    assert draft_run(parse_job(job_text(command, "processes: gpu\n")), RUN).launch.ranks_per_node == 8


@pytest.mark.parametrize(
    "command", ["[python, vllm/train.py]", "[python, x.py, --config=deepspeed.json]", "[python, x, my-torchrun]"]
)
def test_what_only_looks_like_a_launcher_needs_none(command: str) -> None:
    assert draft_run(parse_job(job_text(command)), RUN).launch.ranks_per_node == 8


def test_a_launch_says_how_progress_is_read() -> None:
    more = "progress: {pattern: 'step {step}', hang: 10x, rank: 0, steps: 500}\n"
    told = draft_run(parse_job(job_text("x", more)), RUN).launch.progress
    assert (told["hang_times"], told["hang_seconds"], told["steps"], told["has_steps"]) == (10.0, 0.0, 500, True)
    assert draft_run(parse_job(job_text("x")), RUN).launch.progress == {}


@pytest.mark.parametrize(
    ("more", "line", "problem"),
    [
        ("progress:\n  pattern: 'loss {loss}'\n", 6, "no field is named step"),
        ("progress:\n  pattern: ['{step}', 'step (?P<step>\\d+']\n", 6, "is not a regular expression: missing \\)"),
        ("progress:\n  pattern: 'no names'\n", 6, "has no named fields"),
        ("progress:\n  pattern: 'step {step} {Loss}'\n", 6, "'Loss' is not a valid metric name"),
        ("progress:\n  hang: 9x\n", 5, "give `pattern:`, `prometheus:` or both"),
        ("progress:\n  pattern: '{step}'\n  hang: soon\n", 7, "'soon' is not allowed; write auto, off"),
        ("progress:\n  prometheus: {address: 'ftp://x', names: {a: step}}\n", 6, "write e.g. http://"),
        (
            "progress:\n  prometheus:\n    address: http://x\n    names:\n      a: 7\n",
            9,
            "is not a valid metric name",
        ),
        ("processes: all\n", 5, "write node \\(one process per node\\), gpu"),
        ("workdir: {folder: x}\n", 5, "key 'folder' is not known under workdir"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(more: str, line: int, problem: str) -> None:
    with pytest.raises(ContentError, match=rf"job.yaml:{line}: .*{problem}"):
        parse_job(job_text("x", more))


def test_a_placeholder_with_a_slip_is_told_and_other_braces_are_the_command_s_own() -> None:
    with pytest.raises(ContentError, match=r"job.yaml:3: command: \{node_rnk\} .* did you mean \{node_rank\}\?"):
        parse_job(job_text("[torchrun, '--node-rank={node_rnk}']"))
    parse_job(job_text("[x, '{a}', '{\"rank\": 3}', '{}', '${HOME}']"))
    parse_job(job_text("[sh, -c, 'for node_rnk in 1 2; do echo ${node_rnk} {{node_rnk}}; done']"))
    parse_job(job_text("'echo {node_rnk}'"))
    parse_job(job_text("'for rank in 1 2; do echo ${rank}; done'"))
    for command in ("'train --nodes {num_nodes}'", "[/bin/sh, -c, 'train --nodes {num_nodes}']"):
        text = r"job.yaml:3: command: \{num_nodes\} is not replaced in a shell string; write \$CRATON_NUM_NODES, or"
        with pytest.raises(ContentError, match=text):
            parse_job(job_text(command))
    with pytest.raises(ContentError, match="progress applies to kind command, not serve"):
        parse_job("kind: serve\nmodel: llama-3.1-8b\ncluster: local\nprogress: {pattern: '{step}'}\n")


SCRIPT = """
import os, pathlib, sys
count = pathlib.Path("count")
step = int(count.read_text()) if count.exists() else 0
print(f"step {step + 1} loss VERSION in {os.getcwd()}", flush=True)
count.write_text(str(step + 1))
sys.exit(0 if step else 3)
"""


def test_a_run_and_its_resume_run_the_same_copy(root: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text(SCRIPT.replace("VERSION", "1"))
    more = "progress: {pattern: 'step {step} loss {loss}'}\nrecover: {tries: 0}\n"
    run = start(root, parse_job(job_text("[python, train.py]", more, "local x 1"), folder=work))
    assert wait_for_state(run, "failed", "done").state == "failed"
    (work / "train.py").write_text(SCRIPT.replace("VERSION", "2"))
    resume(run)
    summary = wait_for_state(run, "failed", "done")
    assert (summary.state, summary.step, summary.loss) == ("done", 2, 1.0)
    assert f"in {run.path}/code" in run.log_path(0).read_text()


def test_changed_code_is_not_gone_on_with(root: Path, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.py").write_text(SCRIPT)
    run = start(root, parse_job(job_text("[python, train.py]", "", "local x 1"), folder=tmp_path / "work"))
    wait_for_state(run, "failed")
    changed = run.path / "code" / "train.py"
    changed.chmod(0o644)
    changed.write_text("print('better')\n")
    with pytest.raises(StartError, match=r"train.py in .* has changed; restore it, or start another run"):
        resume(run)


def test_too_much_code_leaves_no_run_behind(root: Path, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "weights.bin").write_bytes(bytes(2_000_000))
    job = parse_job(job_text("x", "workdir: {limit: 1MB}\n", "local x 1"), folder=tmp_path / "work")
    with pytest.raises(StartError, match=r"weights.bin \(2\.\d+ MB\)"):
        start(root, job)
    assert not (root / "mine").exists()


def resume(run: RunDirectory) -> None:
    wait_for_agents(run)
    resume_run(run, draft_resume(run, resumed_job(run)))
    assert not summarize(run).message
