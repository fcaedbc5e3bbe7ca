"""Where the pods of a run are, in which order they get their ranks, and what is said of the place that was got."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from kubernetes_jobs import LEAF, SPINE, cluster, job
from waiting import PATIENCE_SECONDS, wait_until

from craton.agent import Launch, read_launch, write_launch
from craton.infrastructure import TopologyError
from craton.job.layout import Layout
from craton.orchestration import RunStateError
from craton.orchestration.backend import Submission, write_submission
from craton.orchestration.changes import chaos
from craton.orchestration.changes import resize as resizing
from craton.orchestration.draft import Size
from craton.orchestration.kubernetes.gathering import in_order, node_of, sentences
from craton.orchestration.kubernetes.places import Places, level_labels, places_of, read_places
from craton.orchestration.kubernetes.pod import Pod, Signals, follow, prepare
from craton.orchestration.kubernetes.podfile import call_of
from craton.telemetry import RunDirectory
from craton.telemetry.files import read_lines

ZONE = "topology.kubernetes.io/zone"
CLIQUE = "nvidia.com/gpu.clique"
LAUNCH = Launch(0, [f"node-{index}" for index in range(4)], 8, ["true"])
# Pods 0 and 2 share a leaf, 1 and 3 another: the order of pods is the worst there is for pairs of nodes.
HOSTS = {"node-0": "g1", "node-1": "g5", "node-2": "g2", "node-3": "g6"}
PLACES = Places(
    ("spine", "leaf"),
    {f"g{number}": ("spine", "leaf1" if number < 5 else "leaf2") for number in range(1, 9)},
)


def node(name: str, **labels: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}}}


def test_nodes_are_where_the_labels_of_the_cluster_file_say() -> None:
    labels = level_labels(job("pretrain", cluster()))
    assert labels == {"spine": SPINE, "leaf": LEAF}
    found = places_of(
        [
            node("g1", **{SPINE: "s", LEAF: "a", ZONE: "z"}),
            node("g2", **{SPINE: "s", LEAF: "b", ZONE: "z"}),
            node("new", **{SPINE: "s"}),
        ],
        labels,
    )
    assert found == Places(("zone", "spine", "leaf"), {"g1": ("z", "s", "a"), "g2": ("z", "s", "b")})
    assert "no node has the label rack" in places_of([node("g1")], {"leaf": "rack"}).why
    assert "had no node of the job's instance type" in places_of([], labels).why


def test_without_them_nodes_are_where_eks_or_topograph_say() -> None:
    eks = "topology.k8s.aws/network-node-layer-"
    layers = [{f"{eks}1": "a", f"{eks}2": "b", f"{eks}3": leaf} for leaf in ("c", "d")]
    found = places_of([node("g1", **layers[0]), node("g2", **layers[1])], {})
    assert (found.levels, found.addresses["g2"]) == (("core", "spine", "leaf"), ("a", "b", "d"))
    with pytest.raises(TopologyError, match="none of 1 nodes has a topology label"):
        places_of([node("g1")], {"zone": ZONE})


def test_an_nvlink_domain_over_several_nodes_is_the_closest_of_all() -> None:
    nodes = [node(f"g{number}", **{"rack": "r1", CLIQUE: f"d{number % 2}"}) for number in range(4)]
    found = places_of(nodes, {"leaf": "rack"})
    assert (found.levels, found.addresses["g3"]) == (("leaf", "domain"), ("r1", "d1"))
    hosts = {f"node-{number}": f"g{number}" for number in range(4)}
    ordered = in_order(LAUNCH, hosts, found, Layout(tp=16, fsdp=2))
    assert ordered.nodes == ["node-0", "node-2", "node-1", "node-3"], "both tensor groups stay on their NVLink"
    half = [node("g1", **{"rack": "r1", CLIQUE: "d"}), node("g2", **{"rack": "r1", CLIQUE: ""})]
    assert places_of(half, {"leaf": "rack"}).levels == ("leaf",)


def test_what_was_sent_is_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    path.write_text(PLACES.to_text())
    assert read_places(path) == PLACES
    path.write_text('{"addresses": []}')
    assert read_places(path).why == read_places(None).why == "no topology was sent along with the run"


def test_neighbours_in_rank_are_neighbours_in_the_network_and_names_stay_with_their_pods() -> None:
    ordered = in_order(LAUNCH, HOSTS, PLACES, Layout(fsdp=16, replicate=2))
    assert ordered.nodes == ["node-0", "node-2", "node-1", "node-3"]
    assert ordered.leaves == {"node-0": "leaf1", "node-1": "leaf2", "node-2": "leaf1", "node-3": "leaf2"}
    assert [node_of(ordered, index) for index in range(5)] == [*LAUNCH.nodes, None]
    late = in_order(LAUNCH, {"node-3": "g1", "node-1": "g6"}, PLACES, None)
    assert late.nodes == ["node-3", "node-1", "node-0", "node-2"], "who is not there yet comes last"
    many = replace(LAUNCH, nodes=[f"node-{index}" for index in range(12)])
    assert node_of(many, 10) == "node-10"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = RunDirectory.create(tmp_path, "llm")
    levels = {"leaf": {"label": LEAF, "oversubscription": 2.0, "nodes": 4}}
    place = cluster(levels=levels, prices=[{"dollars_per_hour": 40, "kind": "on-demand", "date": "2026-01-01"}])
    made.job_path.write_text(_job_text(place))
    made.plan_path.write_text(json.dumps({"layout": {"fsdp": 32}}))
    write_launch(made, LAUNCH)
    (tmp_path / "nodes.json").write_text(PLACES.to_text())
    return made


def _job_text(place: dict[str, Any]) -> str:
    """JSON is YAML."""
    data = {"path": "/fsx/tokens", "sequence": 8192}
    train = {"global_batch_sequences": 256, "steps": 1000}
    document = {"name": "llm", "kind": "pretrain", "model": "llama-3.1-8b", "data": data, "train": train}
    return json.dumps({**document, "cluster": place, "placement": {"within": "leaf"}})


def test_the_audit_says_what_was_asked_for_and_got_and_what_it_costs(run: RunDirectory) -> None:
    ordered = in_order(LAUNCH, HOSTS, PLACES, Layout(fsdp=32))
    said = sentences(run, ordered, HOSTS, PLACES)
    assert said[0] == "requested one leaf, got 4 nodes on leaf1 x 2, leaf2 x 2: not satisfied"
    assert said[1] == "1 of 1 fsdp groups cross a leaf"
    assert said[2].startswith("predicted cost: ")
    assert "% of every step" in said[2]
    held = {f"node-{index}": f"g{index + 1}" for index in range(4)}
    assert sentences(run, in_order(LAUNCH, held, PLACES, None), held, PLACES) == [
        "requested one leaf, got 4 nodes on leaf1 x 4: satisfied",
        "predicted cost: none",
    ]
    new = {**held, "node-3": "made-since"}
    said = sentences(run, in_order(LAUNCH, new, PLACES, None), new, PLACES)
    assert said == [
        "got 4 nodes, their leaves unknown; requested one leaf, which cannot be checked",
        "the topology of made-since was unknown when the run was submitted",
    ]
    run.job_path.write_text("name: llm\n")
    assert "cannot be compared with the requested one" in sentences(run, ordered, HOSTS, PLACES)[0]


@pytest.fixture
def signals() -> Iterator[Signals]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield Signals()
    for number, handler in before.items():
        signal.signal(number, handler)


def pod_at(run: RunDirectory, index: int, host: str, tmp_path: Path, **more: Any) -> Pod:
    environment = {
        "JOB_COMPLETION_INDEX": str(index),
        "CRATON_SUBMISSION": "first",
        "CRATON_HOST_NAME": host,
        "CRATON_RUN_NODES": str(tmp_path / "nodes.json"),
    }
    return replace(Pod.of(run, environment), **more)


def come_together(run: RunDirectory, hosts: list[str], signals: Signals, tmp_path: Path) -> list[int | None]:
    """What becomes of the pods on these hosts, all at once."""
    found: list[int | None] = [-1] * len(hosts)

    def come(index: int) -> None:
        pod = pod_at(run, index, hosts[index], tmp_path)
        found[index] = prepare(pod, signals) if index == 0 else follow(pod, signals)

    threads = [threading.Thread(target=come, args=(index,), daemon=True) for index in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    return found


def test_pods_call_each_other_and_again_when_they_come_back_elsewhere(
    run: RunDirectory, signals: Signals, tmp_path: Path
) -> None:
    assert come_together(run, ["g1", "g5", "g2", "g6"], signals, tmp_path) == [None] * 4
    assert read_launch(run).nodes == ["node-0", "node-2", "node-1", "node-3"]
    assert call_of(run) == ""
    run.mark("STOP", "SIGTERM to the agent of node-1")  # preempted, and placed anew
    assert come_together(run, ["g6", "g1", "g2", "g3"], signals, tmp_path) == [None] * 4
    again = read_launch(run)
    assert again.nodes == ["node-1", "node-2", "node-3", "node-0"]
    assert again.generation == 1
    placed = [line["message"] for line in read_lines(run.events_path("kubernetes"))[0]]
    assert [text.partition(";")[0] for text in placed] == [
        "rank order: node-0 on g1, node-2 on g2, node-1 on g5, node-3 on g6",
        "rank order: node-1 on g1, node-2 on g2, node-3 on g3, node-0 on g6",
    ]


def test_a_first_pod_that_was_killed_while_it_called_calls_again(
    run: RunDirectory, signals: Signals, tmp_path: Path
) -> None:
    signals.received = signal.SIGTERM
    assert prepare(pod_at(run, 0, "g1", tmp_path), signals) == 75
    assert call_of(run), "the others have not begun"
    signals.received = None
    assert come_together(run, ["g5", "g1", "g2", "g3"], signals, tmp_path) == [None] * 4
    assert read_launch(run).nodes == ["node-1", "node-2", "node-3", "node-0"]


def test_a_run_whose_pods_do_not_come_is_given_up_and_a_stop_is_heard(
    run: RunDirectory, signals: Signals, tmp_path: Path
) -> None:
    assert prepare(pod_at(run, 0, "g1", tmp_path, give_up_seconds=0.3), signals) == 77
    assert "too few of the 4 pods started within 300 ms (recover.give_up)" in run.marker_text("FATAL")
    found: list[int | None] = []
    first = pod_at(run, 0, "g1", tmp_path, submission="second", give_up_seconds=3600.0)
    waiting = threading.Thread(target=lambda: found.append(prepare(first, signals)), daemon=True)
    waiting.start()
    wait_until(lambda: not run.has("FATAL") and bool(call_of(run)))
    run.mark("STOP", "craton stop")
    waiting.join(PATIENCE_SECONDS)
    assert found == [0]


def test_spares_that_do_not_come_are_not_waited_for(
    run: RunDirectory, signals: Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("craton.orchestration.kubernetes.gathering.STRAGGLER_SECONDS", 0.1)
    write_launch(run, replace(LAUNCH, num_nodes=3))
    assert come_together(run, ["g5", "g1", "g2"], signals, tmp_path) == [None] * 3
    assert read_launch(run).nodes == ["node-1", "node-2", "node-0", "node-3"]


@pytest.fixture
def resizable(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """As one of a machine that sees its directory; what a size plans is of no matter here."""
    monkeypatch.setattr(resizing, "check_running", lambda *told: None)
    monkeypatch.setattr(resizing, "plan_size", lambda job, num_nodes, *told: Size(num_nodes, Layout(fsdp=16), None))
    write_submission(run, Submission("kubernetes", "JobSet/llm", {"directory": str(run.path)}))
    return run


def test_a_smaller_run_that_is_evicted_goes_on_with_as_many_as_it_needs(
    resizable: RunDirectory, signals: Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = resizable
    monkeypatch.setattr("craton.orchestration.kubernetes.gathering.STRAGGLER_SECONDS", 0.02)
    for module in ("gathering", "pod"):
        monkeypatch.setattr(f"craton.orchestration.kubernetes.{module}.LOOK_SECONDS", 0.01)
    assert come_together(run, ["g1", "g5", "g2", "g6"], signals, tmp_path) == [None] * 4
    resizing.resize_run(run, resizing.draft_resize(run, 2))
    assert read_launch(run).nodes == ["node-0", "node-2", "node-1", "node-3"], "none is let go"
    run.mark("STOP", "SIGTERM to the agent of node-1")
    assert come_together(run, ["g1", "g2"], signals, tmp_path) == [None] * 2
    placed = str(read_lines(run.events_path("kubernetes"))[0][-1]["message"])
    assert "rank order: node-0 on g1, node-1 on g2; requested one leaf, got 2 nodes on leaf1 x 2: satisfied" in placed


def test_a_run_whose_directory_is_not_seen_here_is_neither_resized_nor_broken(
    resizable: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pods would never hear of it."""
    run = resizable
    write_submission(run, Submission("kubernetes", "JobSet/llm", {"directory": "/fsx/runs/llm"}))
    with pytest.raises(RunStateError, match=r"the pods of llm use /fsx/runs/llm, .*`craton stop llm`, then .* x 2'"):
        resizing.draft_resize(run, 2)
    assert not run.resize_path.exists()
    monkeypatch.setattr(chaos, "check_running", lambda *told: None)
    with pytest.raises(RunStateError, match=r"the pods of llm use /fsx/runs/llm, .*`kubectl exec POD"):
        chaos.arm_faults(run, [])
    assert not run.chaos_folder.exists()


def test_without_places_the_order_is_that_of_pods_and_nobody_waits(
    run: RunDirectory, signals: Signals, tmp_path: Path
) -> None:
    pod = pod_at(run, 0, "g1", tmp_path)
    assert pod.places is not None
    pod.places.write_text(json.dumps(asdict(Places(why="the submitting user may not list the nodes"))))
    assert prepare(pod, signals) is None
    assert read_launch(run).nodes == LAUNCH.nodes
    [placed] = [str(line["message"]) for line in read_lines(run.events_path("kubernetes"))[0]]
    assert placed.endswith("their topology is unknown: the submitting user may not list the nodes")
