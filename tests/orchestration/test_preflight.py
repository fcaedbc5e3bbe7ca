"""Pre-flight: every known degradation of a node is named, a healthy node raises no alarm, and a run records it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from counted_calls import counted_calls
from infrastructure.node_images import DEGRADED, HEALTHY, Degraded, Node, lab_cluster_file
from infrastructure.node_images.degraded import lose_card
from slurm_lab import SlurmLab

from craton.agent import Launch
from craton.infrastructure import Instance
from craton.infrastructure.catalog import instance
from craton.infrastructure.probes import HEALTH_ACTIONS, NodeRoot, bad_pairs, counter_facts, traps, xid_facts
from craton.job import JobError, parse_job
from craton.job.cluster import load_cluster
from craton.job.run_section import PreflightCheck
from craton.orchestration.preflight import PreflightFinding, diagnose, host, preflight, read_nccl_log
from craton.orchestration.preflight.finding import SEVERITIES, Expected, worst
from craton.orchestration.preflight.gpus import is_model
from craton.orchestration.preflight.nccl_log import check_nccl_log
from craton.orchestration.preflight.node_check import examine, expected_of
from craton.orchestration.slurm import diagnose_nodes
from craton.orchestration.slurm.doctor import joined, srun_words
from craton.orchestration.slurm.records import nodes_of_text
from craton.telemetry import RunDirectory
from craton.telemetry.files import read_lines

LAYERS = ("infrastructure", "orchestration", "ML software", "observability")


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    path = tmp_path / "lab.yaml"
    path.write_text(lab_cluster_file(), encoding="utf-8")
    return path


def findings_of(base: str, root: Path, lab: Path) -> list[PreflightFinding]:
    expected = expected_of(str(lab)) if base == "lab-h100" else None
    return examine(NodeRoot(root), expected)[1]


@pytest.mark.parametrize("kind", HEALTHY)
def test_a_healthy_node_raises_no_alarm(kind: str, tmp_path: Path, lab: Path) -> None:
    found = findings_of(kind, HEALTHY[kind]().write(tmp_path / "node"), lab)
    assert [finding for finding in found if finding.severity in ("warn", "fail")] == []
    assert len([finding for finding in found if finding.severity == "ok"]) >= 4


def test_there_are_as_many_images_as_promised() -> None:
    assert len(DEGRADED) >= 20
    assert len(DEGRADED) + len(HEALTHY) >= 24
    assert {case.base for case in DEGRADED} >= {"p5", "p5en", "p6-b200", "p6-b300", "lab-h100"}


@pytest.mark.parametrize("case", DEGRADED, ids=lambda case: case.name.replace(" ", "-"))
def test_a_degradation_is_found(case: Degraded, tmp_path: Path, lab: Path) -> None:
    found = findings_of(case.base, case.node().write(tmp_path / "node"), lab)
    matching = [finding for finding in found if finding.what == case.what and case.evidence in finding.evidence]
    assert [finding.severity for finding in matching] == [case.severity], [
        (finding.what, finding.severity, finding.evidence) for finding in found if finding.severity != "ok"
    ]
    assert matching[0].remedy
    assert matching[0].layer in LAYERS
    assert found == sorted(found, key=lambda finding: -SEVERITIES.index(finding.severity))
    assert SEVERITIES.index(worst(found)) >= SEVERITIES.index(case.severity)  # type: ignore[arg-type]


def test_a_card_that_recovered_is_no_alarm(tmp_path: Path) -> None:
    node = HEALTHY["p5"]()
    node.log += [
        "NVRM: Xid (PCI:0000:63:00): 95, pid=1, uncontained",
        "NVRM: Xid (PCI:0000:63:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
        "NVRM: Xid (PCI:0000:63:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
    ]
    found = [finding for finding in examine(NodeRoot(node.write(tmp_path)))[1] if finding.what == "xid"]
    assert [finding.severity for finding in found] == ["note"]
    assert "XID 95" in found[0].evidence


LOADED = "[ 5000.0] NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.95.05"


def xid_finding(node: Node, uptime: float, folder: Path) -> PreflightFinding:
    node.files["proc/uptime"] = f"{uptime:.2f} 1234.56"
    (found,) = [finding for finding in examine(NodeRoot(node.write(folder)))[1] if finding.what == "xid"]
    return found


@pytest.mark.parametrize(
    ("code", "uptime", "reloaded", "severity", "evidence"),
    [
        (95, 4242.0 + 1800, False, "fail", "XID 95"),
        (95, 4242.0 + 7200, False, "note", "2h ago"),
        (95, 4242.0 + 1800, True, "note", "before the driver was reloaded"),
        (79, 4242.0 + 1800, False, "note", "30m ago"),
        (64, 4242.0 + 1800, False, "note", "30m ago"),
    ],
)
def test_an_xid_whose_remedy_was_applied_is_a_note(
    code: int, uptime: float, reloaded: bool, severity: str, evidence: str, tmp_path: Path
) -> None:
    node = HEALTHY["p5"]()
    node.log.append(f"[ 4242.000000] NVRM: Xid (PCI:0000:63:00): {code}, pid=1, name=python")
    node.log += [LOADED] if reloaded else []
    finding = xid_finding(node, uptime, tmp_path)
    assert (finding.severity, evidence in finding.evidence) == (severity, True), finding


@pytest.mark.parametrize("change", [lose_card, lambda node: node.cards[1].xml.update({"gpu_recovery_action": "Reset"})])
@pytest.mark.parametrize("code", [64, 79, 95])
def test_an_old_xid_of_a_card_that_is_gone_or_not_clean_still_fails(
    code: int, change: Callable[[Node], None], tmp_path: Path
) -> None:
    node = HEALTHY["p5"]()
    node.log += [f"[ 4242.000000] NVRM: Xid (PCI:0000:63:00): {code}, pid=1, name=python", LOADED]
    change(node)
    assert xid_finding(node, 1e6, tmp_path).severity == "fail"


@pytest.mark.parametrize(("link", "severity"), [(26.562, "note"), (0.0, "fail")])
def test_an_old_sxid_is_judged_by_the_links_of_all_cards(link: float, severity: str, tmp_path: Path) -> None:
    node = HEALTHY["p5"]()
    node.log.append("[ 9.0] nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up")
    node.cards[5].links[3] = link
    assert xid_finding(node, 7200.0, tmp_path).severity == severity


def test_a_new_xid_beside_an_old_one_is_the_one_that_counts(tmp_path: Path) -> None:
    node = HEALTHY["p5"]()
    for seconds, code in ((100, 64), (9000, 94), (9900, 95)):
        node.log.append(f"[ {seconds}.0] NVRM: Xid (PCI:0000:63:00): {code}, pid=1, name=python")
    finding = xid_finding(node, 10_000.0, tmp_path)
    assert (finding.severity, "XID 95" in finding.evidence) == ("fail", True)


def test_a_users_bug_is_not_the_nodes_fault(tmp_path: Path) -> None:
    node = HEALTHY["p5"]()
    node.log.append("NVRM: Xid (PCI:0000:63:00): 31, pid=4711, name=python, MMU Fault: ENGINE GRAPHICS")
    found = [finding for finding in examine(NodeRoot(node.write(tmp_path)))[1] if finding.what == "xid"]
    assert [(finding.severity, "usually the program" in finding.remedy) for finding in found] == [("note", True)]
    assert "GPU 1 (0000:63:00.0)" in found[0].evidence


def test_a_job_that_was_given_two_of_eight_gpus_is_content(tmp_path: Path) -> None:
    node = HEALTHY["p5-pod"]()
    node.hidden_cards = [card.bus for card in node.cards[2:]]
    del node.cards[2:]
    _, found = examine(NodeRoot(node.write(tmp_path)), Expected(instance("p5"), num_gpus=2))
    assert {finding.what: finding.severity for finding in found}["gpu_count"] == "ok"


def test_every_entry_of_the_tables_has_a_source_and_can_be_acted_on() -> None:
    for fact in xid_facts().values():
        assert fact.action in HEALTH_ACTIONS
        assert fact.advice
    for entry in (*xid_facts().values(), *bad_pairs(), *traps(), *counter_facts()):
        assert entry.source
        assert entry.date.year >= 2024
    assert xid_facts()[79].action == "reboot"
    assert (xid_facts()[63].action, xid_facts()[64].action) == ("observe", "replace")  # not the other way round


@pytest.mark.parametrize(
    ("name", "kind", "is_it"),
    [
        ("NVIDIA H100 80GB HBM3", "p5", True),
        ("NVIDIA H200", "p5en", True),
        ("NVIDIA H200", "p5", False),
        ("NVIDIA B300 SXM6 AC", "p6-b300", True),
        ("NVIDIA B200", "p6-b300", False),
        ("NVIDIA GH200 480GB", "p5en", False),
    ],
)
def test_cards_are_known_by_their_names(name: str, kind: str, is_it: bool) -> None:
    assert is_model(name, instance(kind).gpu) is is_it


def test_preflight_is_quick_and_becomes_an_event(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "runs", "job")
    run.job_path.write_text("kind: command\ncluster: p5 x 2\ncommand: 'true'\n", encoding="utf-8")
    launch = Launch(3, ["node-0", "node-1"], 8, ["true"], env={"NCCL_PROTO": "simple"}, gpus=True)
    node = HEALTHY["p5"]()
    node.cards[1].xml["remapped_rows/remapped_row_failure"] = "Yes"
    image = NodeRoot(node.write(tmp_path / "node"))
    with counted_calls() as calls:
        found = preflight(run, launch, "node-1", image)
    assert calls.number < 250_000  # a fifth of it, in less than a tenth of a second
    assert {finding.node for finding in found} == {"node-1"}
    (event,) = read_lines(run.events_path("node-1"))[0]
    assert (event["event"], event["generation"], event["worst"], event["checks"]) == (
        "preflight",
        3,
        "fail",
        len(found),
    )
    told = {finding["what"]: finding for finding in event["findings"]}
    assert told["gpu_row_remap"]["severity"] == "fail"
    assert "NCCL_PROTO=simple" in told["environment"]["evidence"]  # of the launch, not of this shell


COMMAND = "kind: command\ncommand: 'true'\nrun: {image: team/train}\n"
PRETRAIN = "kind: pretrain\nmodel: llama-3.1-8b\ntrain: {steps: 1, global_batch_sequences: 16}\n"


def run_of(cluster: str, folder: Path, job: str = PRETRAIN) -> RunDirectory:
    run = RunDirectory.create(folder / "runs", "job")
    run.job_path.write_text(f"cluster: {cluster}\n{job}", encoding="utf-8")
    return run


@pytest.mark.parametrize(("job", "severity"), [(COMMAND, "note"), (PRETRAIN, "fail")])
def test_a_pod_may_run_a_command_that_does_not_use_its_torch(job: str, severity: str, tmp_path: Path) -> None:
    node = HEALTHY["p5"]()
    node.packages["torch"] = "2.11.0+cpu"
    launch = Launch(0, ["node-0", "node-1"], 8, ["true"], gpus=True)
    found = preflight(run_of("p5 x 2", tmp_path, job), launch, "node-0", NodeRoot(node.write(tmp_path / "node")))
    assert {finding.what: finding.severity for finding in found}["torch"] == severity


@pytest.mark.parametrize("gpus", [8, 2])
def test_a_pod_that_stays_on_its_node_needs_no_efa(gpus: int, tmp_path: Path) -> None:
    """Neither a run on one node nor a server on a part of one asks for EFA, so that the pod has none of it."""
    node = HEALTHY["p5-pod"]()
    for port in node.ports:
        port.visible = False
    node.plugin, node.limits["locked memory"] = "", "65536"
    node.hidden_cards = [card.bus for card in node.cards[gpus:]]
    del node.cards[gpus:]
    image = NodeRoot(node.write(tmp_path / "node"))
    alone = preflight(
        run_of("p5 x 1", tmp_path / "one"), Launch(0, ["node-0"], gpus, ["true"], gpus=True), "node-0", image
    )
    assert [finding for finding in alone if finding.severity == "fail"] == []
    lower = {finding.what: finding for finding in alone if "stays on one node" in finding.evidence}
    assert set(lower) >= {"efa_count", "libfabric", "nccl_plugin", "locked_memory"}
    assert {finding.severity for finding in lower.values()} == {"note"}
    two = Launch(0, ["node-0", "node-1"], gpus, ["true"], gpus=True)
    apart = preflight(run_of("p5 x 2", tmp_path / "two"), two, "node-0", image)
    assert {finding.what for finding in apart if finding.severity == "fail"} == set(lower)


def test_ports_of_infiniband_do_not_matter_within_a_node(tmp_path: Path, lab: Path) -> None:
    node = HEALTHY["lab-h100"]()
    node.ports[2].state = "1: DOWN"
    of_lab = expected_of(str(lab))
    assert of_lab is not None
    image = NodeRoot(node.write(tmp_path / "node"))
    for needs_network, severity in ((True, "fail"), (False, "note")):
        found = examine(image, dataclasses.replace(of_lab, needs_network=needs_network))[1]
        assert {finding.what: finding.severity for finding in found}["infiniband"] == severity


def test_a_container_need_not_be_given_ports_that_the_run_does_not_count(tmp_path: Path, lab: Path) -> None:
    node = HEALTHY["lab-h100"]()
    node.ports[8].visible = False  # of storage
    found = examine(NodeRoot(node.write(tmp_path)), expected_of(str(lab)))[1]
    assert {finding.what: finding.severity for finding in found}["infiniband"] == "ok"


STORAGE = "storage: {shared: {path: %s, kind: lustre}, nvme: {path: %s}}\n"


def storage_findings(node: Node, shared: str, nvme: str, folder: Path) -> dict[str, PreflightFinding]:
    file = folder / "cluster.yaml"
    file.write_text("name: train\ninstance: p5.48xlarge\nnodes: 4\n" + STORAGE % (shared, nvme), encoding="utf-8")
    found = examine(NodeRoot(node.write(folder / "node")), expected_of(str(file)))[1]
    return {finding.what: finding for finding in found if finding.what.startswith("storage_")}


def test_storage_is_where_the_cluster_file_says(tmp_path: Path) -> None:
    found = storage_findings(HEALTHY["p5"](), "/fsx/team", "/local_scratch/", tmp_path)
    assert [finding.severity for finding in found.values()] == ["ok", "ok"]


def test_a_path_that_is_the_root_disk_is_no_storage(tmp_path: Path) -> None:
    found = storage_findings(HEALTHY["p5"](), "/lustre", "/scratch", tmp_path)
    shared, nvme = found["storage_shared"], found["storage_nvme"]
    assert {shared.severity, nvme.severity} == {"fail"}
    assert {shared.layer, nvme.layer} == {"orchestration"}  # what all nodes say alike stops a job of Slurm at once
    assert ("/dev/root (ext4)" in shared.evidence, "/fsx" in shared.remedy) == (True, True)
    assert "/local_scratch" in nvme.remedy


@pytest.mark.parametrize(
    ("kind", "change", "severities"),
    [
        ("p5", lambda node: setattr(node, "lustre", False), ("fail", "ok")),  # gone since the node was set up
        ("p5-pod", lambda node: setattr(node, "lustre", False), ("note", "ok")),
        ("p5", lambda node: setattr(node, "drives_mounted", False), ("ok", "fail")),
        ("p5", lambda node: setattr(node, "drives", 0), ("ok", "note")),
    ],
)
def test_mounts_that_are_gone_are_missed(
    kind: str, change: Callable[[Node], None], severities: tuple[str, str], tmp_path: Path
) -> None:
    node = HEALTHY[kind]()
    change(node)
    found = storage_findings(node, "/fsx", "/local_scratch", tmp_path)
    assert (found["storage_shared"].severity, found["storage_nvme"].severity) == severities


@pytest.mark.parametrize(
    ("line", "severity"),
    [
        ("server:/home /fsx nfs4 rw 0 0", "warn"),  # not what the file says, and still shared
        ("auto.master /fsx autofs rw 0 0", None),  # comes when it is looked at
        ("nfsd /proc/fs/nfsd nfsd rw 0 0", "note"),  # the server of the others
    ],
)
def test_other_ways_to_share(line: str, severity: str | None, tmp_path: Path) -> None:
    node = HEALTHY["p5"]()
    node.files["proc/self/mounts"] = f"/dev/root / ext4 rw 0 0\ntmpfs /dev/shm tmpfs rw,size=1g 0 0\n{line}"
    found = storage_findings(node, "/fsx", "/local_scratch", tmp_path)
    assert (found["storage_shared"].severity if "storage_shared" in found else None) == severity


def test_links_to_storage_are_followed(tmp_path: Path) -> None:
    (tmp_path / "node/data").mkdir(parents=True)
    (tmp_path / "node/data/scratch").symlink_to("../local_scratch")
    (tmp_path / "node/shared").symlink_to("/fsx")
    found = storage_findings(HEALTHY["p5"](), "/shared/runs", "/data/scratch/cache", tmp_path)
    assert [finding.severity for finding in found.values()] == ["ok", "ok"]


def test_a_run_without_a_tier_on_nvme_does_not_look_for_one(tmp_path: Path) -> None:
    cluster = "{name: a, instance: p5.48xlarge, nodes: 2, storage: {nvme: {path: /scratch}}}"
    launch = Launch(0, ["node-0", "node-1"], 8, ["true"], gpus=True)
    image = NodeRoot(HEALTHY["p5"]().write(tmp_path / "node"))
    for tiers, severity in (("[]", None), ("[{to: nvme, every: 5m}]", "fail")):
        run = run_of(cluster, tmp_path / tiers[:2], f"{PRETRAIN}checkpoint: {{tiers: {tiers}}}\n")
        found = {finding.what: finding.severity for finding in preflight(run, launch, "node-0", image)}
        assert found.get("storage_nvme") == severity


def test_a_newer_cuda_on_an_old_driver_is_fine_with_its_package(tmp_path: Path) -> None:
    node = HEALTHY["p5en"]()
    node.driver, node.driver_cuda = "570.86.15", "13.0"  # nvidia-smi's word, with cuda-compat
    found = examine(NodeRoot(node.write(tmp_path)))[1]
    assert "known_bad" not in {finding.what for finding in found}
    assert "driver_cuda 13.0" in next(finding.evidence for finding in found if finding.what == "versions")


def test_a_job_may_overrule_a_check_and_the_event_says_so(tmp_path: Path) -> None:
    node = HEALTHY["p5"]()
    node.installer = "1.28.0"
    image = NodeRoot(node.write(tmp_path / "node"))
    launch = Launch(0, ["node-0", "node-1"], 8, ["true"], gpus=True)
    job = f"{PRETRAIN}run: {{preflight_ignore: [known_bad]}}\n"
    run = run_of("p5 x 2", tmp_path, job)
    (finding,) = [finding for finding in preflight(run, launch, "node-0", image) if finding.what == "known_bad"]
    assert (finding.severity, "efa_installer 1.28.0" in finding.evidence) == ("warn", True)
    (event,) = read_lines(run.events_path("node-0"))[0]
    assert event["worst"] == "warn"
    assert "(overruled by run.preflight_ignore)" in str(event["findings"])
    with pytest.raises(JobError, match="did you mean 'known_bad'"):
        parse_job(f"cluster: p5 x 2\n{job.replace('known_bad', 'known_bat')}", "job.yaml")


def test_every_check_that_fails_a_node_can_be_overruled() -> None:
    """But those of the self-tests, of which `run.preflight` says whether they are made, and of a log."""
    texts = [path.read_text(encoding="utf-8") for path in Path(host.__file__).parent.glob("preflight_*.py")]
    failing = {name for text in texts for name in re.findall(r'"([a-z_]+)",\s*"fail"', text)}
    failing |= {case.what for case in DEGRADED if case.severity == "fail"}
    others = {"compute", "bandwidth", "nccl_network", "answer"}
    assert failing - others - set(SEVERITIES) <= set(get_args(PreflightCheck))


def test_large_sizes_have_no_exponent(tmp_path: Path) -> None:
    node = HEALTHY["p5-pod"]()
    node.files["sys/fs/cgroup/kubepods.slice/pod1/memory.max"] = str(1500 * 2**30)
    found = {finding.what: finding.evidence for finding in examine(NodeRoot(node.write(tmp_path)))[1]}
    assert found["shared_memory"] == "/dev/shm has 1,024 GiB"
    assert "1,500 GiB of 2,048 GiB of memory" in found["control_group"]


def test_fewer_processes_than_gpus_still_need_all_gpus(tmp_path: Path) -> None:
    node = HEALTHY["p5"]()
    node.hidden_cards.append(node.cards.pop().bus)
    launch = Launch(0, ["node-0", "node-1"], 1, ["true"], gpus=True, gpus_per_node=8)
    found = preflight(run_of("p5 x 2", tmp_path), launch, "node-0", NodeRoot(node.write(tmp_path / "node")))
    (count,) = [finding for finding in found if finding.what == "gpu_count"]
    assert (count.severity, "7 of 8 GPUs" in count.evidence) == ("fail", True)


def test_preflight_of_a_local_run_needs_no_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine, whatever it is: nothing is measured, so it is through at once."""
    measured: list[object] = []
    for name in (
        "infrastructure.local.measure",
        "orchestration.preflight.node_check.run_compute",
        "orchestration.preflight.node_check.run_bandwidth",
    ):
        monkeypatch.setattr(f"craton.{name}", lambda *asked: measured.append(asked))
    run = RunDirectory.create(tmp_path / "runs", "job")
    run.job_path.write_text("kind: command\ncluster: local x 2\ncommand: 'true'\n", encoding="utf-8")
    found = preflight(run, Launch(0, ["node-0"], 1, ["true"]), "node-0")
    assert measured == []
    assert {finding.what for finding in found} >= {"processors", "shared_memory", "open_files"}


NCCL = "ip-10-0-0-7:41:41 [0] NCCL INFO "
ON_EFA = "\n".join(
    [
        "ip-10-0-0-7:41:41 [0] NCCL INFO NCCL version 2.27.5+cuda12.9",
        f"{NCCL}NET/OFI Initializing aws-ofi-nccl 1.16.3",
        f"{NCCL}NET/OFI Selected provider is efa, fabric is efa (found 32 nics)",
        f"{NCCL}Using network AWS Libfabric",
        f"{NCCL}Channel 00/0 : 7[7] -> 8[0] [receive] via NET/AWS Libfabric/0/GDRDMA",
    ]
)
ON_SOCKETS = "\n".join(
    [
        f"{NCCL}NET/Plugin : dlerror=libnccl-net.so: cannot open shared object file No plugin found (libnccl-net.so)",
        f"{NCCL}NET/Socket : Using [0]enp1s0:10.0.0.7<0>",
        f"{NCCL}Using network Socket",
        f"{NCCL}Channel 00/0 : 7[7] -> 8[0] [receive] via NET/Socket/0",
    ]
)


@pytest.mark.parametrize(
    ("log", "severity", "evidence"),
    [
        (ON_EFA, "ok", "NCCL 2.27.5 uses AWS Libfabric"),
        (ON_SOCKETS, "fail", "uses Socket instead of EFA; it did not find its plugin"),
        (ON_EFA.replace("found 32", "found 16"), "fail", "on 16 of 32 interfaces"),
        (ON_EFA.replace("is efa,", "is tcp,"), "fail", "the provider tcp"),
        (ON_EFA.replace("/GDRDMA", ""), "warn", "without GPUDirect"),
        (ON_EFA.replace("provider is efa, fabric is efa", "Provider is efa"), "ok", "Libfabric"),
        ("step 1 loss 2.5", "note", "does not show it"),
    ],
)
def test_nccls_own_word_on_its_network(log: str, severity: str, evidence: str) -> None:
    (finding,) = check_nccl_log(log, Expected(instance("p5")))
    assert (finding.severity, evidence in finding.evidence) == (severity, True), finding


def test_sockets_are_fine_where_there_is_nothing_else() -> None:
    assert read_nccl_log(ON_SOCKETS).networks[0] == "Socket"
    (finding,) = check_nccl_log(ON_SOCKETS, Expected())
    assert finding.severity == "ok"
    lab = dataclasses.replace(instance("p5"), efa_version=0, network_interfaces=8)
    on_infiniband = f"{NCCL}Using network IB\n{NCCL}Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/3/GDRDMA"
    assert check_nccl_log(on_infiniband, Expected(lab))[0].severity == "ok"
    assert "instead of InfiniBand" in check_nccl_log(ON_SOCKETS, Expected(lab))[0].evidence


def test_nodes_are_asked_by_one_srun(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    scheduler = "scheduler: {kind: slurm, partition: p5, account: lab; rm -rf}"
    path.write_text(f"name: c\ninstance: p5\nnodes: 4\n{scheduler}\n", encoding="utf-8")
    words = srun_words(load_cluster(path), "g[1-4]", 4)
    assert words[:4] == ["srun", "--nodelist=g[1-4]", "--nodes=4", "--ntasks-per-node=1"]
    assert "--account=lab; rm -rf" in words  # one word, and no shell to take it for two
    assert "--gres=gpu:8" in words


def test_without_a_cluster_file_slurm_says_how_many_gpus_to_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Path(__file__).parent / "slurm_samples" / "scontrol-node-22.05.txt"
    records = nodes_of_text(sample.read_text(encoding="utf-8").replace("Gres=gpu:h100:8", "Gres=gpu:h100:8(S:0-1)"))
    monkeypatch.setattr("craton.orchestration.slurm.doctor.read_nodes", lambda nodes: records)
    words = srun_words(None, "g[1-4]", 4)
    assert "--gres=gpu:8" in words
    assert not any(word.startswith("--partition") for word in words)


def test_a_node_that_does_not_answer_is_a_finding() -> None:
    told = [
        PreflightFinding("infrastructure", "nvlink", "fail", "x", node="g10"),
        PreflightFinding("infrastructure", "compute", "ok", "y"),
    ]
    documents = [
        {"findings": [finding.to_json() for finding in told], "nodes": [{"node": "g10"}]},
        {"findings": [], "nodes": [{"node": "g9"}]},
    ]
    found, entries = joined(["g9", "g10", "g11"], documents, "srun: error: Unable to confirm allocation")
    assert [(finding.node, finding.what) for finding in found] == [("g10", "nvlink"), ("g11", "answer")]
    assert "Unable to confirm" in found[1].evidence
    assert [entry["node"] for entry in entries] == ["g9", "g10"]


def test_the_instance_comes_from_the_machine_the_catalog_or_a_cluster_file(tmp_path: Path, lab: Path) -> None:
    image = HEALTHY["p5en"]().write(tmp_path / "node")
    assert diagnose(image).nodes[0]["instance"] == "p5en.48xlarge"
    wrong = diagnose(image, "p6-b200")
    assert {finding.what for finding in wrong.findings if finding.severity == "fail"} >= {"gpu_model"}
    of_lab = expected_of(str(lab))
    assert of_lab is not None
    assert isinstance(of_lab.instance, Instance)
    assert (of_lab.gpus, of_lab.instance.network_interfaces) == (8, 8)


@pytest.fixture
def slurm_cluster(tmp_path: Path, slurm: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> str:
    """A real Slurm whose nodes are processes of this machine, and the file that describes it."""
    monkeypatch.setenv("CRATON_RUNS", str(tmp_path / "runs"))
    gpu = "{name: none, generation: cpu, flops: {bf16: 1e12}, memory_bytes: 4GB, memory_bytes_per_second: 10GB/s}"
    hardware = f"{{name: lab, gpu: {gpu}, num_gpus: 1, network_bytes_per_second: 1GB/s}}"
    path = tmp_path / "slurm.yaml"
    path.write_text(f"name: lab\nhardware: {hardware}\nnodes: 8\nscheduler: {{kind: slurm, partition: train}}\n")
    return str(path)


@pytest.mark.parametrize("has_file", [True, False])
def test_nodes_of_a_real_slurm_answer_by_slurms_names(slurm_cluster: str, has_file: bool) -> None:
    found = diagnose_nodes("g[2-3]", slurm_cluster if has_file else None)
    assert [node["node"] for node in found.nodes] == ["g2", "g3"]
    assert {finding.node for finding in found.findings} == {"g2", "g3"}
    assert "answer" not in {finding.what for finding in found.findings}


@pytest.mark.slow
def test_nodes_of_a_real_slurm_measure_each_other(slurm_cluster: str) -> None:
    found = diagnose_nodes("g[1-3]", slurm_cluster, compute=True, bandwidth=True)
    assert found.bandwidth is not None
    assert found.bandwidth["names"] == ["g1", "g2", "g3"]
    assert [len(one) for one in found.bandwidth["rounds"]][:3] == [1, 1, 1]
    assert all(node["compute"][0]["hashes"] for node in found.nodes)
    (compute,) = [finding for finding in found.findings if finding.what == "compute"]
    assert (compute.severity, "3 devices" in compute.evidence) == ("ok", True)
