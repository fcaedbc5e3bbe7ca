"""A draft is something that can run, or one line that says what to change."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from counting import counting_job, wait_for_state

from craton.agent import Launch
from craton.agent.processes import free_port
from craton.agent.processes.process import common_environment
from craton.job import parse_job
from craton.orchestration import StartError
from craton.orchestration.draft import draft_run, named_job
from craton.orchestration.draft.draft import check_gres
from craton.orchestration.local import check_machine
from craton.orchestration.start import start_run
from craton.telemetry import RunDirectory, RunError

TRAIN = """\
name: small
kind: pretrain
model: llama-3.2-1b
data: {sequence: 4096}
train: {global_batch_sequences: 32, steps: 100}
cluster: p5.48xlarge x 1
"""
RUN = Path("/runs/small")


def test_a_training_job_gets_its_plan_and_a_rank_for_each_gpu() -> None:
    draft = draft_run(parse_job(TRAIN), RUN, port=4321)
    assert draft.plan is not None
    assert draft.plan.fits
    assert draft.num_ranks == draft.plan.layout.world == 8
    assert draft.launch.gpus
    assert draft.launch.master_port == 4321
    assert draft.launch.command[-3:] == ["-m", "craton.ml.training", "/runs/small"]


def test_the_files_are_what_the_ranks_and_ps_will_read() -> None:
    job = parse_job(TRAIN)
    files = draft_run(job, RUN).files()
    assert list(files) == ["job.yaml", "plan.json", "launch.json"]
    assert parse_job(files["job.yaml"]) == job
    assert json.loads(files["plan.json"])["steps"] == 100
    assert json.loads(files["launch.json"])["nodes"] == ["node-0"]


def test_a_command_is_not_planned_but_runs_on_every_node() -> None:
    draft = draft_run(counting_job(nodes=3, STEPS=7), RUN)
    assert draft.plan is None
    assert "no plan" in draft.note
    assert draft.num_ranks == 3
    assert draft.launch.env["STEPS"] == "7"
    assert set(draft.files()) == {"job.yaml", "launch.json"}


def test_a_single_text_goes_to_the_shell() -> None:
    job = parse_job("kind: command\ncommand: echo $RANK\ncluster: local x 1\n")
    assert draft_run(job, RUN).launch.command == ["/bin/sh", "-c", "echo $RANK"]


def test_a_model_that_is_a_function_runs_without_a_plan(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text("def build(): ...\n")
    draft = draft_run(parse_job(TRAIN.replace("llama-3.2-1b", "models:build")), RUN, job_folder=tmp_path)
    assert draft.plan is None
    assert "whose shape is unknown" in draft.note
    assert draft.launch.env["CRATON_JOB_FOLDER"] == str(tmp_path)


def test_a_layout_of_every_kind_may_be_started() -> None:
    text = TRAIN + "layout: {pp: 2, cp: 2, tp: 2, vpp: 2, schedule: interleaved}\n"
    draft = draft_run(parse_job(text), RUN)
    assert draft.plan is not None
    layout = draft.plan.layout
    assert (layout.pp, layout.cp, layout.tp, layout.vpp) == (2, 2, 2, 2)


def test_a_stop_inside_the_job_reaches_the_ranks() -> None:
    assert draft_run(parse_job(TRAIN), RUN, stop_at=60).launch.env["CRATON_STOP_AT"] == "60"


REFUSED = {
    "an unknown backend": (TRAIN, {"on": "laptop"}, ["laptop", "local, slurm, kubernetes"]),
    "more than this machine": (
        TRAIN.replace("x 1", "x 4"),
        {},
        ["job.yaml:6", "p5.48xlarge x 4", "local x 2", "--on slurm"],
    ),
    "a secret that is not there": (TRAIN + "run: {secrets: [NO_SUCH]}\n", {}, ["NO_SUCH", "export NO_SUCH=..."]),
    "a stop behind the end": (TRAIN, {"stop_at": 100}, ["--stop-at 100", "1 to 99"]),
    "a stop before the first step": (TRAIN, {"stop_at": 0}, ["--stop-at 0"]),
    "a precision for later": (TRAIN.replace("100}", "100, precision: nvfp4}"), {}, ["nvfp4", "fp32, bf16, fp8"]),
    "an optimizer for later": (TRAIN.replace("100}", "100, optimizer: sgd}"), {}, ["sgd", "optimizer: adamw"]),
    "an object tier that is nowhere": (
        TRAIN + "checkpoint: {tiers: [{to: object}]}\n",
        {},
        ["job.yaml:7", "storage.object.path", "to: s3://bucket/checkpoints"],
    ),
    "offload": (TRAIN + "layout: {offload: optimizer}\n", {}, ["job.yaml:7", "not trained yet", "offload: none"]),
    "too little memory": (
        TRAIN.replace("llama-3.2-1b", "llama-3.1-405b"),
        {},
        ["does not fit p5.48xlarge x 1", "GiB", "use a smaller model"],
    ),
    "states alone are too large": (
        TRAIN.replace("llama-3.2-1b", "llama-3.1-70b") + "layout: {fsdp: 8, micro_batch: 2}\n",
        {},
        ["job.yaml:7", "optimizer states", "use a smaller model"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_run_is_refused_with_what_to_change(case: str) -> None:
    text, options, words = REFUSED[case]
    with pytest.raises(StartError) as caught:
        draft_run(parse_job(text), RUN, **options)  # type: ignore[arg-type]
    for word in words:
        assert word in str(caught.value)


def test_a_draft_for_a_cluster_is_made_of_what_its_nodes_have(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: object) -> None:
        raise AssertionError("this machine is not where the job runs")

    monkeypatch.setattr("craton.orchestration.draft.draft.visible_accelerators", measured)
    monkeypatch.setattr("craton.infrastructure.cluster.local_instance", measured)
    draft = draft_run(parse_job(TRAIN.replace("x 1", "x 4")), RUN, on="slurm")
    launch = draft.launch
    assert (draft.on, len(launch.nodes), launch.ranks_per_node, launch.gpus) == ("slurm", 4, 8, True)
    assert launch.threads_per_rank == 192 // 8
    assert launch.agent_command == [], "an agent can be started only on its own node"
    counted = draft_run(counting_job(nodes=3), RUN, on="slurm").launch
    assert (len(counted.nodes), counted.ranks_per_node, counted.gpus) == (3, 1, False)


@pytest.mark.parametrize(
    ("text", "on", "found"),
    [("", None, "local"), ("run: {on: slurm}\n", None, "slurm"), ("run: {on: slurm}\n", "kubernetes", "kubernetes")],
)
def test_the_command_line_says_where_before_the_job_does(text: str, on: str | None, found: str) -> None:
    assert draft_run(parse_job(TRAIN + text), RUN, on=on).on == found


def test_an_image_has_its_own_python() -> None:
    text = TRAIN + "run: {on: slurm, image: team/train.sqsh}\n"
    assert draft_run(parse_job(text), RUN).launch.command[0] == "python3"
    assert draft_run(parse_job(text), RUN, on="local").launch.command[0] != "python3"


def test_another_name_is_checked_as_the_job_files_own() -> None:
    assert named_job(counting_job(), "again-2").name == "again-2"
    assert named_job(counting_job(), None).name == "count"
    with pytest.raises(ValueError, match="is not a name"):
        named_job(counting_job(), "not a name")
    assert issubclass(StartError, RunError)


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which nvidia-smi sees two H100s."""
    tool = tmp_path / "nvidia-smi"
    cards = "0, GPU-aaaa, NVIDIA H100 80GB HBM3, 81559\n1, GPU-bbbb, NVIDIA H100 80GB HBM3, 81559"
    details = "".join(
        f"<gpu id='00000000:0{place}:00.0'><uuid>GPU-{letter * 4}</uuid>"
        "<product_name>NVIDIA H100 80GB HBM3</product_name></gpu>"
        for place, letter in enumerate("ab")
    )
    xml = f"<nvidia_smi_log><driver_version>580.1</driver_version>{details}</nvidia_smi_log>"
    tool.write_text(f'#!/bin/sh\ncase "$*" in\n*-x*) cat <<END\n{xml}\nEND\n;;\n*) cat <<END\n{cards}\nEND\n;;\nesac\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("two_gpus")
def test_local_nodes_share_the_gpus_and_each_sees_its_own(root: Path) -> None:
    text = "name: cards\nkind: command\ncommand: echo sees $CUDA_VISIBLE_DEVICES\ncluster: local x 2\n"
    job = parse_job(text, folder=Path(__file__).parent)
    draft = draft_run(job, root / "cards", port=free_port())
    assert (draft.launch.gpus, draft.launch.ranks_per_node) == (True, 1)
    check_machine(draft.launch)
    run = start_run(draft, root)
    wait_for_state(run, "done")
    assert [run.log_path(rank).read_text() for rank in (0, 1)] == ["sees GPU-aaaa\n", "sees GPU-bbbb\n"]


@pytest.mark.usefixtures("two_gpus")
def test_more_gpus_than_there_are_is_refused_before_the_start() -> None:
    draft = draft_run(parse_job(TRAIN), RUN)
    with pytest.raises(StartError, match="needs 8 GPUs, and this machine has 2"):
        check_machine(draft.launch)
    three = parse_job("kind: command\ncommand: x\ncluster: local x 3\n")
    with pytest.raises(StartError, match="cannot divide 2 GPUs evenly"):
        draft_run(three, RUN)


def test_a_command_on_machines_that_cost_has_a_price_too() -> None:
    text = "kind: command\ncommand: [python, train.py]\ncluster: p5.48xlarge x 2\nrecover: {spares: 1}\n"
    priced = draft_run(parse_job(text + "price: {dollars_per_hour: 10}\n"), RUN, on="slurm")
    assert priced.dollars_per_hour == 30.0
    assert draft_run(parse_job("kind: command\ncommand: x\ncluster: local\n"), RUN).dollars_per_hour is None
    assert json.loads(priced.files()["launch.json"])["dollars_per_day"] == 720.0


PRICED = {
    "of the job": "cluster: p5.48xlarge x 2\nrecover: {spares: 4}\nprice: {dollars_per_hour: 10}\n",
    "of the cluster file": "cluster: {name: lab, instance: p5.48xlarge, nodes: 6, spares: 4, "
    "prices: [{dollars_per_hour: 10}]}\n",
}


@pytest.mark.parametrize("spares", PRICED)
def test_training_and_a_command_on_the_same_nodes_cost_the_same_spares_included(spares: str) -> None:
    fixed = "layout: {fsdp: 16, micro_batch: 1}\n"
    training = draft_run(
        parse_job(TRAIN.replace("cluster: p5.48xlarge x 1\n", PRICED[spares] + fixed)), RUN, on="slurm"
    )
    command = draft_run(parse_job(f"kind: command\ncommand: x\n{PRICED[spares]}"), RUN, on="slurm")
    for draft in (training, command):
        assert (len(draft.launch.nodes), draft.launch.dollars_per_day) == (6, 1440.0)
    assert training.plan is not None
    assert training.plan.cost is not None
    cost = training.plan.cost
    assert cost.num_instances == 6
    assert cost.cost_dollars == pytest.approx(60.0 / 3600 * training.plan.run_seconds)


def test_a_command_pays_for_whole_ultraservers_as_training_does() -> None:
    text = "kind: command\ncommand: x\ncluster: p6e-gb200.36xlarge x 2\nprice: {dollars_per_hour: 10}\n"
    assert draft_run(parse_job(text), RUN, on="slurm").dollars_per_hour == 180.0


ON_SLURM = "kind: command\ncommand: [python, train.py]\ncluster: local x 2\nrun: {on: slurm, gres: 'GRES'}\n"


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [("gpu:8", 8), ("gpu:h100:4", 4), ("gpu", 1), ("gpu:h100", 1), ("nvme:2,gpu:2,gpu:a100:1", 3), ("nvme:2", 0)],
)
def test_a_command_has_the_gpus_that_slurm_is_asked_for(gres: str, gpus: int) -> None:
    draft = draft_run(parse_job(ON_SLURM.replace("GRES", gres)), RUN)
    assert (draft.launch.gpus, draft.launch.ranks_per_node) == (gpus > 0, max(1, gpus))
    assert draft.launch.gpus_per_node == max(1, gpus)
    assert "gres" not in draft.note
    one = draft_run(parse_job(ON_SLURM.replace("GRES", gres) + "processes: node\n"), RUN).launch
    assert (one.ranks_per_node, one.gpus_per_node) == (1, max(1, gpus))


def test_gpus_are_hidden_from_ranks_that_need_none_but_not_from_a_command_on_a_cluster(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "run")

    def shown(text: str, on: str) -> str | None:
        launch = draft_run(parse_job(text), RUN, on=on).launch
        return common_environment(run, launch, "node-0").get("CUDA_VISIBLE_DEVICES")

    command = "kind: command\ncommand: [python, train.py]\ncluster: local\n"
    assert shown(command, "slurm") is None
    assert shown(command + "run: {env: {CUDA_VISIBLE_DEVICES: '2,3'}}\n", "slurm") == "2,3"
    assert shown(command, "local") == ""
    own_model = TRAIN.replace("llama-3.2-1b", "my.models:build").replace("p5.48xlarge x 1", "local")
    assert shown(own_model, "slurm") == ""


def test_gpus_that_contradict_the_catalog_are_refused_and_those_that_a_plan_leaves_idle_are_told() -> None:
    command = "kind: command\ncommand: x\ncluster: p5.48xlarge x 2\n"
    with pytest.raises(StartError, match=r"job.yaml:4: run.gres gpu:4 requests 4 GPUs per node, .* needs 8 "):
        draft_run(parse_job(f"{command}run: {{on: slurm, gres: 'gpu:4'}}\n"), RUN)
    assert "gres" not in draft_run(parse_job(f"{command}run: {{on: slurm, gres: 'gpu:h100:8'}}\n"), RUN).note
    serve = "kind: serve\nmodel: llama-3.1-8b\nserve: {initialize: random}\ncluster: p5.48xlarge x 1\n"
    assert draft_run(parse_job(serve + "run: {on: slurm, gres: 'gpu:8'}\n"), RUN).note == ""
    here = parse_job(TRAIN.replace("p5.48xlarge x 1", "local") + "run: {on: slurm, gres: 'gpu:8'}\n")
    planned_as_this_machine = Launch(0, ["node-0"], 1, ["python"], gpus=False)
    assert "requests 8 GPUs per node, and its ranks use none of them" in check_gres(here, planned_as_this_machine)


def test_a_server_on_a_machine_that_costs_has_its_price_beside_its_command() -> None:
    text = "kind: serve\nmodel: llama-3.1-8b\nserve: {initialize: random}\ncluster: p5.48xlarge x 1\n"
    draft = draft_run(parse_job(text + "price: {dollars_per_hour: 10}\n"), RUN)
    assert json.loads(draft.files()["launch.json"])["dollars_per_day"] == 240.0
