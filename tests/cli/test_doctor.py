"""`craton doctor`: a table for people, JSON for scripts, exit code 1 when something fails, other nodes through srun."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from infrastructure.node_images import HEALTHY
from waiting import PATIENCE_SECONDS

from craton.agent import Launch, write_launch
from craton.cli import main
from craton.telemetry import RunDirectory

FINDING_KEYS = {"layer", "what", "severity", "evidence", "remedy", "node", "action"}


class Doctor:
    """The verb in this process: what it printed, and how it ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capfd = monkeypatch, capfd

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "argv", ["craton", "doctor", *arguments])
        self._capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        printed = self._capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, printed.out, printed.err


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Doctor:
    return Doctor(monkeypatch, capfd)


def test_a_healthy_node_ends_with_zero(doctor: Doctor, tmp_path: Path) -> None:
    code, output, _ = doctor("--root", str(HEALTHY["p5"]().write(tmp_path)))
    assert code == 0
    assert "8 of 8 GPUs" in output
    assert "ip-10-0-0-7 (p5.48xlarge): " in output


def test_a_degraded_node_ends_with_one_and_what_to_do(doctor: Doctor, tmp_path: Path) -> None:
    node = HEALTHY["p5"]()
    node.cards[1].links[7] = 0.0
    node.lustre_efa = 2
    code, output, _ = doctor("--root", str(node.write(tmp_path)))
    assert code == 1
    told = [line for line in output.splitlines() if line.strip().startswith(("fail", "warn"))]
    assert "17 of 18 NVLinks up" in told[0]
    assert "reboot the node" in told[0]
    assert "2 of 8 EFA interfaces" in told[1]
    assert "1 fail, 1 warn" in output


def test_json_has_the_same_keys_whatever_happened(doctor: Doctor, tmp_path: Path) -> None:
    node = HEALTHY["p6-b200"]()
    node.plugin = ""
    for name, wanted in (("bad", 1), ("good", 0)):
        code, output, _ = doctor("--root", str(node.write(tmp_path / name)), "--json")
        document = json.loads(output)
        assert code == wanted
        assert set(document) == {"schema", "worst", "findings", "nodes", "bandwidth"}
        assert document["schema"] == 1
        assert document["worst"] == ("fail" if wanted else "note")
        assert all(set(finding) == FINDING_KEYS for finding in document["findings"])
        (entry,) = document["nodes"]
        assert set(entry) == {"node", "instance", "report", "compute", "compute_failed"}
        assert set(entry["report"]) == {"host", "gpus", "fabric", "disks", "kernel_log", "software"}
        node.plugin = "1.17.2"


def test_this_machine_is_checked_without_a_word_about_what_it_should_be(doctor: Doctor) -> None:
    code, output, _ = doctor("--json")
    document = json.loads(output)
    assert code == (1 if document["worst"] == "fail" else 0)
    assert {"shared_memory", "processors"} <= {finding["what"] for finding in document["findings"]}


def test_this_machine_is_no_p5(doctor: Doctor) -> None:
    code, output, _ = doctor("--cluster", "p5", "--json")
    found = {finding["what"]: finding["severity"] for finding in json.loads(output)["findings"]}
    assert code == 1
    assert found["gpu_count"] == "fail"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["g1", "--root", "."], "omit NODES"),
        (["--root", "no-such-folder"], "is not a folder"),
        (["--root", ".", "--compute"], "remove --compute"),
        (["--cluster", "p55"], "unknown instance 'p55'"),
        (["--nccl-log", "no-such-run"], "no run named 'no-such-run'"),
        (["--nccl-log", "x", "--compute"], "omit NODES, --root, --compute"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], complaint: str, doctor: Doctor) -> None:
    code, output, errors = doctor(*arguments)
    assert (code, output) == (2, "")
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert complaint in errors


EFA = "NCCL INFO Using network AWS Libfabric\nNCCL INFO Channel 00/0 : 7[7] -> 8[0] via NET/AWS Libfabric/0/GDRDMA\n"
SOCKETS = "NCCL INFO Using network Socket\n"


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run on two p5 nodes whose third rank is on sockets."""
    monkeypatch.setenv("CRATON_RUNS", str(tmp_path / "runs"))
    run = RunDirectory.create(tmp_path / "runs", "llama")
    run.job_path.write_text("kind: command\ncluster: p5 x 2\ncommand: 'true'\n", encoding="utf-8")
    write_launch(run, Launch(0, ["node-0", "node-1"], 8, ["true"], gpus=True))
    for rank in range(16):
        run.log_path(rank).parent.mkdir(exist_ok=True)
        run.log_path(rank).write_text("step 1 loss 2.5\n" + (SOCKETS if rank == 3 else EFA), encoding="utf-8")
    return run


def test_nccls_network_is_told_from_the_logs_of_a_run(two_nodes: RunDirectory, doctor: Doctor) -> None:
    code, output, _ = doctor("--nccl-log", "llama", "--json")
    bad, good = json.loads(output)["findings"]
    assert (code, bad["severity"], good["severity"]) == (1, "fail", "ok")
    assert bad["evidence"].startswith("rank-00003: NCCL uses Socket instead of EFA")
    assert good["evidence"].startswith("rank-00000, rank-00001, rank-00002, rank-00004 and 11 more: ")
    two_nodes.log_path(3).write_text(EFA, encoding="utf-8")
    code, output, _ = doctor("--nccl-log", "llama")
    assert code == 0
    assert "uses AWS Libfabric" in output


def test_nccls_network_does_not_matter_within_a_node(two_nodes: RunDirectory, doctor: Doctor) -> None:
    write_launch(two_nodes, Launch(0, ["node-0"], 8, ["true"], gpus=True))
    code, output, _ = doctor("--nccl-log", "llama", "--json")
    found = json.loads(output)["findings"]
    assert code == 0
    assert {each["severity"] for each in found} == {"note", "ok"}


def test_nccls_network_is_told_from_one_log(two_nodes: RunDirectory, doctor: Doctor) -> None:
    log = str(two_nodes.log_path(3))
    assert doctor("--nccl-log", log)[0] == 0  # what else there is on that node, the log does not say
    code, output, _ = doctor("--nccl-log", log, "--cluster", "p5")
    assert code == 1
    assert "uses Socket instead of EFA" in " ".join(output.split())


SRUN = """
import os, subprocess, sys
from concurrent.futures import ThreadPoolExecutor
options = dict(word.removeprefix("--").partition("=")[::2] for word in sys.argv[1:] if word.startswith("--"))
hosts = {"g[1-3]": ["g1", "g2", "g3"]}[options["nodelist"]]
with open(IMAGES + "/asked", "a") as asked:
    asked.write(" ".join(sys.argv[1:]) + chr(10))
command = sys.argv[sys.argv.index(sys.executable):]
def on(host):
    if not os.path.isdir(f"{IMAGES}/{host}"):
        print(f"srun: error: Node {host} failed", file=sys.stderr)
        return 1
    places = [options[name].replace("%t", str(hosts.index(host))) for name in ("output", "error")]
    with open(places[0], "w") as output, open(places[1], "w") as errors:
        return subprocess.run([*command, "--root", f"{IMAGES}/{host}"], stdout=output, stderr=errors).returncode
with ThreadPoolExecutor(2) as pool:
    sys.exit(max(pool.map(on, hosts)))
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster file, and a srun that runs the command for every host, on the image of that host."""
    images, tools = tmp_path / "images", tmp_path / "tools"
    images.mkdir()
    tools.mkdir()
    program = tools / "srun"
    program.write_text(f"#!{sys.executable}\nIMAGES = {str(images)!r}\n{textwrap.dedent(SRUN)}", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setenv("CRATON_RUNS", str(tmp_path / "runs"))
    cluster = "name: c\ninstance: p5\nnodes: 4\nscheduler: {kind: slurm, partition: gpu}\n"
    (tmp_path / "cluster.yaml").write_text(cluster, encoding="utf-8")
    return tmp_path


def test_nodes_of_a_cluster_are_asked_at_once(slurm: Path, doctor: Doctor) -> None:
    for host in ("g1", "g2"):
        node = HEALTHY["p5"]()
        node.name = host
        if host == "g2":
            node.ports.pop()
        node.write(slurm / "images" / host)
    code, output, _ = doctor("g[1-3]", "--cluster", str(slurm / "cluster.yaml"), "--json")
    document = json.loads(output)
    failed: list[dict[str, Any]] = [each for each in document["findings"] if each["severity"] == "fail"]
    assert code == 1
    assert [(each["node"], each["what"]) for each in failed] == [("g2", "efa_count"), ("g3", "answer")]
    assert "srun: error: Node g3 failed" in failed[1]["evidence"]
    assert [entry["node"] for entry in document["nodes"]] == ["g1", "g2"]
    (asked,) = (slurm / "images" / "asked").read_text(encoding="utf-8").splitlines()
    assert asked.startswith("--nodelist=g[1-3] --nodes=3 --ntasks-per-node=1 --partition=gpu --gres=gpu:8")
    assert list((slurm / "runs").iterdir()) == []  # what the nodes wrote is gone


def test_a_cluster_file_without_slurm_is_refused_with_what_to_do(slurm: Path, doctor: Doctor) -> None:
    (slurm / "plain.yaml").write_text("name: c\ninstance: p5\nnodes: 4\n", encoding="utf-8")
    code, _, errors = doctor("g[1-3]", "--cluster", str(slurm / "plain.yaml"))
    assert code == 2
    assert "remove --cluster to use this machine's Slurm" in errors


def test_without_slurm_and_a_cluster_file_it_says_where_to_run_it(
    slurm: Path, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(slurm))
    code, _, errors = doctor("p5-[1-16]")
    assert code == 2
    assert "not installed here" in errors
    assert "login node" in errors


def test_without_srun_it_says_so(slurm: Path, doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(slurm))
    code, _, errors = doctor("g1", "--cluster", str(slurm / "cluster.yaml"))
    assert code == 2
    assert "srun is not installed here" in errors


@pytest.mark.slow
def test_the_self_test_is_part_of_it_when_asked_for() -> None:
    """The whole command as a user starts it, torch and all."""
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "craton", "doctor", "--compute", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    document = json.loads(ended.stdout)
    (device, *_) = document["nodes"][0]["compute"]
    assert device["error"] == ""
    assert set(device["hashes"]) >= {"matmul_bf16", "matmul_fp32", "attention_bf16"}
    assert [each["severity"] for each in document["findings"] if each["what"] == "compute"] == ["ok"]
