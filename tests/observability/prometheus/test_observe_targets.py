"""What is scraped: found in run directories and on machines, and gone when it should be."""

from __future__ import annotations

import errno
import io
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from observed import LiveRun, Served
from rich.console import Console
from waiting import wait_until

from craton.cli.views.live import make_console
from craton.cli.views.observe import _picture, keep_targets
from craton.job.cluster import load_cluster
from craton.observability.prometheus import Observed, ObserverSettings, TargetKeeper, observer, targets
from craton.observability.prometheus.targets import ScrapedMachine, SearchedExporters, look_at, merged, write_targets
from craton.telemetry import RunDirectory, list_runs
from craton.telemetry.members import MEMBERS_FOLDER, member_runs

JOB = """
name: beta
kind: serve
model: qwen3-0.6b
serve: {host: 0.0.0.0, port: 8123}
cluster: local
"""


def test_agents_of_a_run_that_goes_on(live_run: LiveRun) -> None:
    found = look_at(list_runs(live_run.run.path.parent))
    assert {(target.job, target.address, target.labels["node"], target.labels["leaf"]) for target in found.targets} == {
        ("craton", f"127.0.0.1:{live_run.ports['n0']}", "n0", "leaf1"),
        ("craton", f"127.0.0.1:{live_run.ports['n1']}", "n1", ""),
    }
    assert {target.labels["run"] for target in found.targets} == {"alpha"}
    assert [machine.host for machine in found.machines] == ["127.0.0.1"]


def test_agents_of_members_are_targets_named_after_their_owner(live_run: LiveRun, tmp_path: Path) -> None:
    owner = RunDirectory.create(tmp_path, "fleet")
    (owner.path / MEMBERS_FOLDER).mkdir()
    live_run.run.path.rename(owner.path / MEMBERS_FOLDER / "worker-0")
    keeper = TargetKeeper(ObserverSettings(runs=(owner,)), tmp_path / "targets", SearchedExporters({}))
    keeper.refresh()
    assert {target.labels["run"] for target in keeper.targets} == {"fleet/worker-0"}
    assert ObserverSettings(runs=tuple(member_runs(owner))).root == tmp_path


def test_a_run_that_ended_has_no_targets(live_run: LiveRun) -> None:
    live_run.end()
    assert look_at([live_run.run]).targets == ()


def test_a_node_that_left_alone_is_no_target(live_run: LiveRun) -> None:
    live_run.beat("n1", "released")
    assert [target.labels["node"] for target in look_at([live_run.run]).targets] == ["n0"]


def test_a_node_that_vanished_stays_a_target_but_not_for_ever(live_run: LiveRun) -> None:
    live_run.beat("n1", "running", age_seconds=120)
    assert len(look_at([live_run.run]).targets) == 2
    live_run.beat("n1", "running", age_seconds=4000)
    assert [target.labels["node"] for target in look_at([live_run.run]).targets] == ["n0"]


def test_a_node_that_vanished_from_a_run_that_failed_is_no_target(live_run: LiveRun) -> None:
    live_run.run.mark("FATAL", "no more")
    live_run.beat("n1", "running", age_seconds=120)
    assert [target.labels["node"] for target in look_at([live_run.run]).targets] == ["n0"]


def test_a_lost_node_that_the_run_went_on_without_is_told_of_and_then_no_target(live_run: LiveRun) -> None:
    live_run.beat("n0", "running", generation=1)
    live_run.beat("n1", "running", age_seconds=60)
    assert len(look_at([live_run.run]).targets) == 2, "NodeDown wants half a minute"
    live_run.beat("n1", "running", age_seconds=300)
    found = look_at([live_run.run])
    assert [target.labels["node"] for target in found.targets] == ["n0"]
    live_run.beat("n1", "running", age_seconds=300, generation=1)
    assert len(look_at([live_run.run]).targets) == 2, "the others wait for it"


def test_a_server_is_scraped_where_it_listens(live_run: LiveRun) -> None:
    live_run.run.plan_path.write_text(json.dumps({"kind": "serve"}))
    live_run.run.job_path.write_text(JOB)
    (target,) = (target for target in look_at([live_run.run]).targets if target.job == "craton-serve")
    assert target.address == "127.0.0.1:8123"
    assert target.labels == {"run": "alpha", "node": "n0", "leaf": "leaf1"}


def test_a_server_whose_job_file_is_broken_hides_no_agent(live_run: LiveRun) -> None:
    live_run.run.plan_path.write_text(json.dumps({"kind": "serve"}))
    live_run.run.job_path.write_text("name: [")
    assert {target.job for target in look_at([live_run.run]).targets} == {"craton"}


def test_exporters_are_found_where_they_answer_and_kept_when_they_stop(served: Served) -> None:
    machines = [ScrapedMachine("127.0.0.1", "g1", "leaf7")]
    served.text = "# HELP x X\n# TYPE x gauge\nx 1\n"
    search = SearchedExporters({"dcgm": served.port, "node": 1})
    (target,) = search.look(machines)
    assert (target.job, target.labels) == ("dcgm", {"node": "g1", "leaf": "leaf7"})
    served.close()
    assert search.look(machines) == [target], "its silence must be seen"
    assert search.look([]) == [], "its machine belongs to nobody any more"


def test_ports_that_drop_packets_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of them, a second each: Prometheus starts meanwhile, and who answers is found."""
    dropped, asked = threading.Event(), []

    def answers(host: str, port: int) -> bool:
        asked.append(host)
        return host == "there" or (dropped.wait() and host == "late")

    monkeypatch.setattr(targets, "serves_metrics", answers)
    monkeypatch.setattr(targets, "PATIENCE_SECONDS", 0.05)
    search = SearchedExporters({"node": 9100})
    machines = [ScrapedMachine(name, name) for name in ("there", "late", *(f"g{i}" for i in range(100)))]
    try:
        first = wait_until(lambda: search.look(machines))
        assert [target.labels["node"] for target in first] == ["there"]
        assert search.look([*machines, ScrapedMachine("new", "new")]) == first
        assert "new" not in asked, "one search at a time"
    finally:
        dropped.set()
    found = wait_until(lambda: (now := search.look(machines)) != first and now)
    assert [target.labels["node"] for target in found] == ["late", "there"]
    assert all(thread.daemon for thread in search._searching), "Ctrl-C does not wait for them"


def test_a_leaf_that_is_known_later_is_told(served: Served) -> None:
    served.text = "# TYPE x gauge\nx 1\n"
    search = SearchedExporters({"dcgm": served.port})
    assert search.look([ScrapedMachine("127.0.0.1", "g1")])[0].labels["leaf"] == ""
    assert search.look([ScrapedMachine("127.0.0.1", "g1", "leaf7")])[0].labels["leaf"] == "leaf7"


def test_a_machine_that_is_told_of_twice_is_one() -> None:
    told = [
        ScrapedMachine("g1", "g1"),
        ScrapedMachine("10.0.0.1", "g1.cluster.local", "leaf1"),
        ScrapedMachine("10.0.0.2", "g2", "leaf1"),
        ScrapedMachine("10.0.0.3", "10.0.0.3"),
        ScrapedMachine("10.0.0.4", "10.0.0.4"),
    ]
    assert merged(told) == (ScrapedMachine("g1", "g1", "leaf1"), *told[2:])


def test_a_busy_node_of_slurm_is_scraped_once_and_has_its_leaf(
    live_run: LiveRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run tells the address of this machine, Slurm its name."""
    here = socket.gethostname()
    answers = {"sinfo": f"{here}\n{here}\nidle-1\n", "scontrol": f"SwitchName=leaf7 Level=0 Nodes={here},idle-1\n"}
    monkeypatch.setattr(observer, "_output", lambda command: answers[command[0]])
    monkeypatch.setattr(targets, "serves_metrics", lambda host, port: True)
    slurm = load_cluster(Path(__file__).parents[3] / "examples/clusters/slurm-p5.yaml")
    settings = ObserverSettings(runs=(live_run.run,), cluster=slurm)
    keeper = TargetKeeper(settings, tmp_path / "targets", SearchedExporters({"node": 9100}))
    keeper.refresh()
    found = [(target.address, dict(target.labels)) for target in keeper.targets if target.job == "node"]
    assert sorted(found) == sorted((f"{name}:9100", {"node": name, "leaf": "leaf7"}) for name in (here, "idle-1"))


def test_an_address_is_shown_as_it_is() -> None:
    target = {"job": "craton-node", "address": "[fd00::5]:9500", "run": "", "node": "g1", "health": "up", "error": ""}
    console = Console(width=120, file=io.StringIO())
    console.print(_picture(Observed((target,), ())))
    assert isinstance(console.file, io.StringIO)
    assert "[fd00::5]:9500" in console.file.getvalue()


def test_something_else_at_an_exporters_port_is_no_exporter(served: Served) -> None:
    served.text = "<html>hello</html>"
    assert SearchedExporters({"node": served.port}).look([ScrapedMachine("127.0.0.1", "g1")]) == []


def test_files_of_targets_change_only_with_the_targets(live_run: LiveRun, tmp_path: Path) -> None:
    folder = tmp_path / "targets"
    found = look_at([live_run.run]).targets
    write_targets(folder, found)
    before = {path.name: path.stat().st_ino for path in folder.iterdir()}
    assert set(before) == {f"{job}.json" for job in ("craton", "craton-serve", "craton-node", "dcgm", "node", "efa")}
    write_targets(folder, found)
    assert {path.name: path.stat().st_ino for path in folder.iterdir()} == before
    assert json.loads((folder / "craton.json").read_text())[0]["labels"]["run"] == "alpha"
    live_run.end()
    write_targets(folder, look_at([live_run.run]).targets)
    assert json.loads((folder / "craton.json").read_text()) == [{"targets": []}]


def test_files_without_targets_are_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CRATON_RUNS", str(tmp_path / "elsewhere"))
    keeper = TargetKeeper(ObserverSettings(), tmp_path / "targets", SearchedExporters({}))
    keep_targets(keeper, 0.01, 0.03, make_console(), as_json=False)
    said = capsys.readouterr().out.replace("\n", "")
    assert said.count(f"no active run in {tmp_path}/elsewhere") == 1


def test_a_keeper_sees_runs_come_and_go(live_run: LiveRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRATON_RUNS", str(live_run.run.path.parent))
    keeper = TargetKeeper(ObserverSettings(), tmp_path / "targets", SearchedExporters({}))
    keeper.refresh()
    assert len(keeper.targets) == 2
    live_run.end()
    keeper.refresh()
    assert keeper.targets == []


@pytest.mark.parametrize("broken", ["runs", "heartbeat"])
def test_a_file_system_that_fails_is_said_and_the_last_targets_stay(
    live_run: LiveRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broken: str
) -> None:
    monkeypatch.setenv("CRATON_RUNS", str(live_run.run.path.parent))
    keeper = TargetKeeper(ObserverSettings(), tmp_path / "targets", SearchedExporters({}))
    keeper.refresh()
    before = (tmp_path / "targets/craton.json").read_text()
    listing, names = Path.iterdir, targets.names_in

    def stale(self: Path) -> Iterator[Path]:
        if self.name == broken:
            raise OSError(errno.ESTALE, "Stale file handle")
        return listing(self)

    def stale_names(folder: Path, pattern: str = "*") -> list[str]:
        if folder.name == broken:
            raise OSError(errno.ESTALE, "Stale file handle")
        return names(folder, pattern)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "iterdir", stale)
        patched.setattr(targets, "names_in", stale_names)
        keep_targets(keeper, 0.01, 0.05, make_console(), as_json=False)
    assert len(keeper.targets) == 2
    assert (tmp_path / "targets/craton.json").read_text() == before
    assert capsys.readouterr().out.count("Stale file handle") == 1, "said, and once"
    keeper.refresh()
    assert keeper.trouble == ""
