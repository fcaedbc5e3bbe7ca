"""The scripts of the nodes, really run: with a `craton` that says what the test wants or judges the image of a node,
and an API server of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from aws_clusters import cluster
from infrastructure.node_images import DEGRADED, HEALTHY, Degraded
from infrastructure.node_images import Node as Image
from waiting import PATIENCE_SECONDS

from craton.infrastructure.aws import node_check, provision
from craton.infrastructure.probes import NodeRoot
from craton.orchestration.preflight.node_check import examine

TOOLS = ("craton", "scontrol", "logger")
Api = tuple[int, list[dict[str, Any]]]  # port, patches
CRASH = "Traceback (most recent call last):\nKeyError: 'gpus'"


class Node:
    """A node whose tools write down how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tools = folder / "bin"
        self.tools.mkdir()
        self.doctor(0)
        for name in TOOLS[1:]:
            self._tool(name, "exit 0")
        self._tool("python", f'exec {sys.executable} "$@"')
        self._tool("nvidia-smi", "exit 0")

    def doctor(self, code: int, seconds: float = 0, what: str = "gpu_count", layer: str = "infrastructure") -> None:
        """One that ends with `code`; with 1 because of a finding that fails."""
        severity = "fail" if code == 1 else "ok"
        found = [{"layer": layer, "what": what, "severity": severity, "evidence": "7 of 8 GPUs"}]
        self.doctor_says(json.dumps({"findings": found}), code, seconds)

    def doctor_says(self, text: str, code: int, seconds: float = 0) -> None:
        (self.folder / "said").write_text(text)
        self._tool("craton", f"sleep {seconds}; cat {self.folder}/said; exit {code}")

    def doctor_sees(self, image: Path) -> None:
        """The real one, on the image of a node."""
        self._tool("craton", f'exec {sys.executable} -m craton "$@" --root {image}')

    def run(self, text: str, **environment: str) -> subprocess.CompletedProcess[str]:
        script = self.folder / "script.sh"
        script.write_text(text)
        own = {
            "PATH": f"{self.tools}:/usr/bin:/bin",
            "CRATON": str(self.tools / "craton"),
            "CRATON_STATE": str(self.folder / "state"),
            "DCGM_JOB_MAPPING": str(self.folder / "mapping"),
        }
        command = ["bash", str(script)]
        return subprocess.run(
            command, env={**own, **environment}, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS
        )

    def calls(self, tool: str) -> list[str]:
        path = self.folder / f"{tool}.calls"
        return path.read_text().splitlines() if path.exists() else []

    def mapping(self) -> dict[str, str]:
        folder = self.folder / "mapping"
        return {path.name: path.read_text() for path in sorted(folder.iterdir())} if folder.exists() else {}

    def _tool(self, name: str, does: str) -> None:
        path = self.tools / name
        path.write_text(f'#!/bin/bash\necho "$*" >> {self.folder}/{name}.calls\n{does}\n')
        path.chmod(0o755)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def hook(folder: Path, name: str, policy: str = "replace") -> str:
    made = provision(cluster(folder, "pcs", health={"policy": policy}), "pcs")
    return made.files[f"scripts/hooks/{name}.sh"]


def test_a_healthy_node_takes_the_job(node: Node) -> None:
    done = node.run(hook(node.folder, "prolog"), SLURM_JOB_ID="812", SLURM_JOB_GPUS="0,3")
    assert done.returncode == 0, done.stderr
    assert node.calls("craton") == ["doctor --json"]
    assert node.mapping() == {"0": "812\n", "3": "812\n"}


def test_an_unfit_node_refuses_it(node: Node) -> None:
    node.doctor(1)
    done = node.run(hook(node.folder, "prolog"), SLURM_JOB_ID="812", SLURM_JOB_GPUS="0")
    assert done.returncode == 1
    assert "unfit" in done.stdout
    assert node.mapping() == {}


@pytest.mark.parametrize(("what", "layer"), [("torch", "ML software"), ("efa_count", "orchestration")])
def test_what_is_wrong_with_software_does_not_drain_the_node(node: Node, what: str, layer: str) -> None:
    """A prolog that fails drains its node, and no node mends what is installed."""
    node.doctor(1, what=what, layer=layer)
    assert node.run(hook(node.folder, "prolog"), SLURM_JOB_ID="812", SLURM_JOB_GPUS="0").returncode == 0
    assert node.run(hook(node.folder, "health"), SLURMD_NODENAME="g1").returncode == 0
    assert node.calls("scontrol") == []
    assert node.calls("logger") == [f"-t craton software failure, not of this node: {what}: 7 of 8 GPUs"] * 2
    assert node.mapping() == {"0": "812\n"}


def test_a_job_whose_node_fails_its_prolog_is_not_held(node: Node) -> None:
    """On HyperPod beside what its slurm.conf says already. PCS is told nothing that it may not take."""
    for target, is_told in {"parallelcluster": True, "pcs": False}.items():
        (node.folder / target).mkdir()
        text = provision(cluster(node.folder / target, target), target).files["cluster.yaml"]
        assert ("SchedulerParameters" in text, "nohold_on_prolog_fail" in text) == (is_told, is_told)
    (node.folder / "hyperpod").mkdir()
    made = provision(cluster(node.folder / "hyperpod", "hyperpod-slurm"), "hyperpod-slurm")
    (script,) = [text for name, text in made.files.items() if "slurm.conf" in text and name.endswith(".sh")]
    conf = node.folder / "slurm.conf"
    part = script[script.index("conf=/opt/slurm/etc/slurm.conf") :].replace("/opt/slurm/etc/slurm.conf", str(conf))
    for before, after in {
        "SchedulerParameters=bf_continue,max_rpc_cnt=64\n": "bf_continue,max_rpc_cnt=64,nohold_on_prolog_fail",
        "ClusterName=p5\n": "nohold_on_prolog_fail",
    }.items():
        conf.write_text(before)
        for _ in range(2):  # the script may run again
            assert node.run(part).returncode == 0
        assert [line for line in conf.read_text().splitlines() if "SchedulerParameters" in line] == [
            f"SchedulerParameters={after}"
        ]


@pytest.mark.parametrize("code", [2, 127])
def test_a_node_that_cannot_be_checked_takes_it(node: Node, code: int) -> None:
    node.doctor(code)
    assert node.run(hook(node.folder, "prolog"), SLURM_JOB_ID="812").returncode == 0
    assert f"exit code {code}" in node.calls("logger")[0]


@pytest.mark.parametrize(
    "said", [CRASH, "", '{"error": "no space left on device", "problems": []}', '{"findings": [], "worst": "ok"}']
)
def test_a_doctor_that_fails_itself_does_not_blame_the_node(node: Node, said: str) -> None:
    """A crash ends with 1, as a failed check does."""
    node.doctor_says(said, 1)
    assert node.run(hook(node.folder, "prolog"), SLURM_JOB_ID="812").returncode == 0
    assert node.run(hook(node.folder, "health"), SLURMD_NODENAME="g1").returncode == 0
    assert node.calls("scontrol") == []
    assert ["exit code 1" in line for line in node.calls("logger")] == [True, True]


def test_a_check_that_hangs_does_not_hold_the_job(node: Node) -> None:
    node.doctor(1, seconds=20)
    text = hook(node.folder, "prolog").replace("timeout 60", "timeout 0.2")
    assert node.run(text, SLURM_JOB_ID="812").returncode == 0
    assert "exit code 124" in node.calls("logger")[0]


def test_with_the_policy_observe_an_unfit_node_works_on(node: Node) -> None:
    node.doctor(1)
    assert node.run(hook(node.folder, "prolog", "observe"), SLURM_JOB_ID="812").returncode == 0
    assert node.run(hook(node.folder, "health", "observe")).returncode == 0
    assert node.calls("scontrol") == []
    assert len(node.calls("logger")) == 2


def test_the_epilog_leaves_the_numbers_of_other_jobs(node: Node) -> None:
    for job, gpus in (("812", "0,1"), ("81", "1")):
        node.run(hook(node.folder, "prolog"), SLURM_JOB_ID=job, SLURM_JOB_GPUS=gpus)
    done = node.run(hook(node.folder, "epilog"), SLURM_JOB_ID="812", SLURM_JOB_GPUS="0,1")
    assert done.returncode == 0, done.stderr
    assert node.mapping() == {"1": "81\n"}


@pytest.mark.parametrize("policy", ["drain", "replace"])
def test_the_health_check_drains_an_unfit_node(node: Node, policy: str) -> None:
    node.run(hook(node.folder, "health", policy), SLURMD_NODENAME="g1")
    assert node.calls("scontrol") == []
    node.doctor(1)
    done = node.run(hook(node.folder, "health", policy), SLURMD_NODENAME="g1")
    assert done.returncode == 0, done.stderr
    (call,) = node.calls("scontrol")
    assert call.startswith("update nodename=g1 state=drain reason=craton doctor: ")


def test_hyperpod_is_asked_to_replace_the_node(node: Node) -> None:
    node.doctor(1)
    text = hook(node.folder, "health").replace("/opt/sagemaker_cluster", str(node.folder))
    node.run(text, SLURMD_NODENAME="g1")
    assert node.calls("scontrol") == ["update nodename=g1 state=fail reason=Action:Replace"]


def test_values_of_the_cluster_file_do_not_reach_the_shell(tmp_path: Path) -> None:
    made = provision(cluster(tmp_path, "pcs", {"package": "craton; touch /tmp/owned $(id) 'x'"}), "pcs")
    line = next(line for line in made.files["scripts/setup.sh"].splitlines() if "pip install" in line)
    spoken = subprocess.run(
        ["bash", "-c", line.replace("/opt/craton/bin/pip", "printf '%s\\n'")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert spoken.stdout.splitlines()[-1] == "craton; touch /tmp/owned $(id) 'x'"


def test_the_setup_tells_prometheus_where_the_node_is(tmp_path: Path) -> None:
    text = provision(cluster(tmp_path, "parallelcluster"), "parallelcluster").files["scripts/setup.sh"]
    last = [line for line in text.splitlines() if line.startswith("echo ")][-1].replace(
        "/fsx/prometheus", str(tmp_path)
    )
    subprocess.run(["bash", "-c", last], check=True)
    name = os.uname().nodename.split(".")[0]
    (entry,) = json.loads((tmp_path / f"{name}.json").read_text())
    assert entry["targets"] == [f"{name}:{port}" for port in (9100, 9109, 9400)]


@pytest.fixture
def api() -> Iterator[Api]:
    """An API server's port, and the patches that it got."""
    got: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_PATCH(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            got.append({"path": self.path, "type": self.headers["Content-Type"], "body": body})
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server.server_address[1], got
    server.shutdown()
    server.server_close()
    thread.join()


def health_pod(node: Node, api: Api, **environment: str) -> subprocess.CompletedProcess[str]:
    """One round of the health pod's program, with GPUs that a runtime gave it."""
    control = node.folder / "nvidiactl"
    control.touch()
    own = {
        "PATH": f"{node.tools}:/usr/bin:/bin",
        "KUBERNETES_SCHEME": "http",
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": str(api[0]),
        "NODE_NAME": "g1",
        "CHECK_SECONDS": "60",
        "INTERVAL_SECONDS": "0",
        "ROUNDS": "1",
        "CORDON": "yes",
        "FIT_FILE": str(node.folder / "fit"),
        "GPU_CONTROL": str(control),
    }
    command = [sys.executable, str(Path(node_check.__file__))]
    done = subprocess.run(
        command, env={**own, **environment}, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize(("code", "cordon", "patches"), [(0, "yes", 0), (1, "yes", 1), (1, "no", 0), (2, "yes", 0)])
def test_the_health_pod_cordons_an_unfit_node(node: Node, api: Api, code: int, cordon: str, patches: int) -> None:
    node.doctor(code)
    health_pod(node, api, CORDON=cordon)
    got = api[1]
    assert len(got) == patches
    assert (node.folder / "fit").exists() == (code != 1)
    if patches:
        assert got[0]["path"] == "/api/v1/nodes/g1"
        assert got[0]["body"]["spec"] == {"unschedulable": True}
        assert "7 of 8 GPUs" in got[0]["body"]["metadata"]["annotations"]["craton/unfit"]
        assert got[0]["type"] == "application/merge-patch+json"


def bare_pod() -> Image:
    """What the health pod sees of a healthy p5: all GPUs, 64 MiB of shared memory, no EFA devices, no libfabric, no
    plugin of NCCL, little locked memory, and a torch that is not for GPUs."""
    image = HEALTHY["p5-pod"]()
    image.shared_memory_kib = 64 * 1024
    image.limits["locked memory"] = "65536"
    image.installer = image.plugin = ""
    image.packages = {"torch": "2.11.0+cpu"}
    for port in image.ports:
        port.visible = False
    return image


def test_the_health_pod_does_not_cordon_a_healthy_node(node: Node, api: Api) -> None:
    node.doctor_sees(bare_pod().write(node.folder / "image"))
    done = health_pod(node, api)
    for what in ("efa_count", "shared_memory", "nccl_plugin", "torch"):  # doctor fails them, and rightly, for this pod
        assert f"problem of this pod, not of the node: {what}: " in done.stdout
    assert api[1] == []
    assert (node.folder / "fit").exists()


def test_the_health_pod_cordons_a_node_with_a_broken_link(node: Node, api: Api) -> None:
    image = bare_pod()
    image.cards[1].links[7] = 0.0
    node.doctor_sees(image.write(node.folder / "image"))
    health_pod(node, api)
    (patch,) = api[1]
    assert "17 of 18 NVLinks up" in patch["body"]["metadata"]["annotations"]["craton/unfit"]
    assert not (node.folder / "fit").exists()


@pytest.mark.parametrize("case", DEGRADED, ids=lambda case: case.name.replace(" ", "-"))
def test_the_health_pod_judges_the_cards_and_nothing_else(case: Degraded, tmp_path: Path) -> None:
    found = [finding.to_json() for finding in examine(NodeRoot(case.node().write(tmp_path / "image")))[1]]
    failed = {finding["what"] for finding in found if finding["severity"] == "fail"}
    of_cards = {what for what in failed if what.startswith(("gpu_", "nvlink", "xid"))} - {"gpu_model"}
    assert {finding["what"] for finding in node_check.judged(found)} == of_cards


def test_what_the_health_pod_judges_is_what_doctor_says() -> None:
    known = {case.what for case in DEGRADED if case.severity == "fail"}
    assert set(node_check.JUDGED) <= known


@pytest.mark.parametrize("said", [CRASH, "", "[]", '{"error": "no space left on device"}', '{"findings": null}'])
def test_a_doctor_that_crashes_in_the_pod_does_not_blame_the_node(node: Node, api: Api, said: str) -> None:
    node.doctor_says(said, 1)
    assert "cannot be checked: craton doctor ended with 1" in health_pod(node, api).stderr
    assert api[1] == []
    assert (node.folder / "fit").exists()


def test_a_pod_without_gpus_does_not_blame_the_node(node: Node, api: Api) -> None:
    """Where the container runtime is not NVIDIA's: the driver is loaded, its tools and devices are not here."""
    node.doctor(1)
    assert "gave this pod no GPUs" in health_pod(node, api, GPU_CONTROL=str(node.folder / "none")).stderr
    (node.tools / "nvidia-smi").unlink()
    assert "gave this pod no GPUs" in health_pod(node, api).stderr
    assert api[1] == []
    assert node.calls("craton") == []


def test_a_health_pod_without_craton_does_not_blame_the_node(node: Node, api: Api) -> None:
    (node.tools / "craton").unlink()
    assert "cannot be checked" in health_pod(node, api).stderr
    assert (node.folder / "fit").exists()
