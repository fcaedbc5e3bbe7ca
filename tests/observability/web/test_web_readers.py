"""What the page reads of a run: newest lines, curves, heat map, nodes, events, logs; and that it is not read twice."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulated_runs import STEP_SECONDS, metrics_line, plan_document, write_run

from craton.agent.coordination import avoid_node
from craton.observability.web.charts import training_charts
from craton.observability.web.heatmap import MAX_COLUMNS, heat_map
from craton.observability.web.readers import (
    KEPT_LINES,
    PHASES,
    History,
    Nodes,
    RankTails,
    Records,
    history,
    read_member,
    read_piece,
    sources,
    topology,
)
from craton.observability.web.readers import nodes as nodes_module
from craton.observability.web.readers import ranks as ranks_module
from craton.observability.web.readers.logs import PIECE_BYTES
from craton.observability.web.rendering import render
from craton.observability.web.sources import ServerLooks, look_curves
from craton.orchestration import ServerAddress, histogram_quantile
from craton.telemetry import RunDirectory, event_fields
from craton.telemetry.node import Heartbeat, NodeStatus, RankStatus, read_status, write_heartbeat, write_status


def table_of(run: RunDirectory) -> Any:
    member = read_member(run)
    return RankTails(run).look(member.nodes, member.ranks_per_node, member.generation, member.num_stages)


def test_every_rank_is_there_with_its_newest_step(tmp_path: Path) -> None:
    run = write_run(tmp_path, "one", nodes=3, ranks_per_node=4, steps=20)
    table = table_of(run)
    assert table.ranks == list(range(12))
    assert table.nodes == [f"node-{rank // 4}" for rank in range(12)]
    assert set(table.steps) == {20}
    assert np.nansum(table.phase_seconds, axis=1) == pytest.approx(table.column("run_step_seconds"))
    assert np.median(table.column("run_step_seconds")) == pytest.approx(STEP_SECONDS, rel=0.02)


def test_only_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    run = write_run(tmp_path, "one", nodes=2, ranks_per_node=1, steps=4)
    tails, member = RankTails(run), read_member(run)
    before = tails.look(member.nodes, 1, 0)
    path = run.metrics_path("node-1")
    kept = os.stat(path)
    text = path.read_text().replace('"step":4', '"step":9')  # as long as it was
    path.write_text(text)
    os.utime(path, ns=(kept.st_atime_ns, kept.st_mtime_ns))
    assert tails.look(member.nodes, 1, 0).steps == before.steps
    with open(path, "a", encoding="utf-8") as file:
        file.write(metrics_line(5, 1, "node-1", time.time(), random.Random(0)))
    assert tails.look(member.nodes, 1, 0).steps == [4, 5]


def test_lines_of_another_generation_and_torn_ones_are_not_counted(tmp_path: Path) -> None:
    run = write_run(tmp_path, "one", nodes=1, ranks_per_node=1, steps=4)
    with open(run.metrics_path("node-0"), "a", encoding="utf-8") as file:
        file.write('{"run_step_seconds":99.0,"rank":0,"step":7,"generation":8}\n{"run_step_seconds":5')
    table = table_of(run)
    assert table.steps == [4]
    assert table.column("run_step_seconds")[0] < 3


def test_the_slow_rank_is_the_one_that_computes_longer_and_waits_least(tmp_path: Path) -> None:
    drawn = heat_map(table_of(write_run(tmp_path, "one", nodes=4, ranks_per_node=4, steps=10, slow_rank=6)))
    compute, communication = (drawn["cells"][PHASES.index(phase)] for phase in ("compute", "communication"))
    assert max(range(16), key=lambda rank: compute[rank]) == 6
    assert min(range(16), key=lambda rank: communication[rank]) == 6


def test_a_wide_run_is_read_deeper_at_the_second_look_and_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_module, "FEW_RANKS", 4)
    run = write_run(tmp_path, "one", nodes=4, ranks_per_node=4, steps=20, slow_rank=6)
    tails, nodes = RankTails(run), [f"node-{number}" for number in range(4)]
    assert set(tails.look(nodes, 4, 0).num_lines) == {1}
    table = tails.look(nodes, 4, 0)
    assert set(table.num_lines) == {KEPT_LINES}
    assert tails.look(nodes, 4, 0) is table  # nothing was added, so nothing is made anew
    with open(run.metrics_path("node-1"), "a", encoding="utf-8") as file:
        file.write(metrics_line(21, 6, "node-1", time.time(), random.Random(0)))
        file.write(metrics_line(22, 6, "node-1", time.time(), random.Random(0))[:50])  # not finished yet
    table = tails.look(nodes, 4, 0)
    assert (table.steps[5:8], table.num_lines[6]) == ([20, 21, 20], KEPT_LINES)
    monkeypatch.setattr(ranks_module, "FEW_RANKS", 16)
    afresh = table_of(run)
    assert afresh.values == pytest.approx(table.values, nan_ok=True)
    assert np.array_equal(afresh.lines, table.lines, equal_nan=True)
    shutil.copy(run.metrics_path("node-0"), run.metrics_path("node-1"))  # a file that was begun anew has other ranks
    os.truncate(run.metrics_path("node-1"), 100)
    assert tails.look(nodes, 4, 0).ranks == [0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15]


def test_a_file_that_cannot_be_read_for_a_moment_is_read_at_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path, "one", nodes=1, ranks_per_node=2, steps=20)
    tails, between = RankTails(run), ranks_module._between

    def fails(*given: Any, **more: Any) -> tuple[bytes, int]:
        raise OSError("Stale file handle")

    monkeypatch.setattr(ranks_module, "_between", fails)
    assert len(tails.look(["node-0"], 2, 0)) == 0
    monkeypatch.setattr(ranks_module, "_between", between)
    assert tails.look(["node-0"], 2, 0).steps == [20, 20]


def test_a_wide_heat_map_keeps_the_rank_that_is_furthest_off(tmp_path: Path) -> None:
    run = write_run(tmp_path, "one", nodes=130, ranks_per_node=8, steps=2, slow_rank=777)
    table = table_of(run)
    drawn = heat_map(table)
    phase = PHASES.index("compute")
    assert len(drawn["cells"][phase]) == MAX_COLUMNS < len(table)
    column = int(np.argmax(drawn["cells"][phase]))
    place = drawn["furthest"][phase][column]
    assert (drawn["ranks"][place], drawn["nodes"][place]) == (777, "node-97")
    assert drawn["edges"][column] <= 777 < drawn["edges"][column + 1]
    assert len(json.dumps(drawn, allow_nan=False)) < 400_000


def test_curves_follow_rank_0_and_read_only_what_is_new(tmp_path: Path) -> None:
    run = write_run(tmp_path, "one", nodes=2, steps=30)
    followed = History(run)
    curves = followed.look()
    assert curves.steps == list(range(1, 31))
    assert len([value for value in curves.values["run_evaluation_loss"] if value is not None]) == 1
    path = run.metrics_path("node-0")
    with open(path, "r+b") as file:  # what was read is not looked at again
        file.write(b"x" * 100)
    with open(path, "a", encoding="utf-8") as file:
        file.write(metrics_line(31, 0, "node-0", time.time(), random.Random(0))[:-20])
    assert followed.look().steps[-1] == 30
    with open(path, "a", encoding="utf-8") as file:
        file.write(metrics_line(31, 0, "node-0", time.time(), random.Random(0))[-20:])
    assert followed.look().steps == list(range(1, 32))


def test_a_long_file_is_read_in_pieces_and_keeps_its_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "WHOLE_BYTES", 200_000)
    monkeypatch.setattr(history, "CHUNKS", 40)
    monkeypatch.setattr(history, "CHUNK_BYTES", 4_000)
    run = write_run(tmp_path, "one", nodes=1, ranks_per_node=2, steps=1500)
    curves = History(run).look()
    assert run.metrics_path("node-0").stat().st_size > 5 * history.WHOLE_BYTES
    assert curves.steps[-1] == 1500
    assert curves.steps[0] < 10
    assert max(b - a for a, b in zip(curves.steps, curves.steps[1:], strict=False)) < 80
    losses = [value for value in curves.values["run_loss"] if value is not None]
    assert losses[0] > 9 > 3 > losses[-1]


def test_after_a_long_time_without_a_look_pieces_are_read_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "WHOLE_BYTES", 40_000)
    monkeypatch.setattr(history, "CHUNKS", 10)
    monkeypatch.setattr(history, "CHUNK_BYTES", 1_000)
    run = write_run(tmp_path, "one", nodes=1, ranks_per_node=1, steps=1)
    followed = History(run)
    assert followed.look().steps == [1]
    with open(run.metrics_path("node-0"), "a", encoding="utf-8") as file:
        for step in range(2, 5001):
            file.write(json.dumps({"step": step, "run_loss": 1.0, "rank": 0}) + "\n")
    whole_lines, read_bytes = history._whole_lines, []

    def note(file: Any, start: int, size: int, is_cut: bool) -> Any:
        read_bytes.append(size)
        return whole_lines(file, start, size, is_cut)

    monkeypatch.setattr(history, "_whole_lines", note)
    steps = followed.look().steps
    assert sum(read_bytes) == 10 * 1_000 + 10_000 < run.metrics_path("node-0").stat().st_size / 5
    assert (steps[:3], steps[-1]) == ([1, 2, 3], 5000)
    assert max(b - a for a, b in pairwise(steps)) < 600


def test_what_was_begun_anew_is_read_from_its_beginning(tmp_path: Path) -> None:
    run = write_run(tmp_path, "one", nodes=1, steps=40)
    followed, records = History(run), Records(run)
    assert followed.look().steps[-1] == 40
    assert records.look()[0]["step"] == 40
    shutil.rmtree(run.path)
    write_run(tmp_path, "one", nodes=1, steps=12)
    assert followed.look().steps == list(range(1, 13))
    assert [event["step"] for event in records.look()] == [10]
    assert {tier.tier: tier.step for tier in records.tiers({})} == {"nvme": 10}


def test_a_curve_that_was_followed_is_as_fine_at_its_beginning_as_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MAX_POINTS", 60)
    monkeypatch.setattr(history, "KEPT_POINTS", 240)
    monkeypatch.setattr(history, "MAX_EVALUATIONS", 30)
    monkeypatch.setattr(history, "KEPT_EVALUATIONS", 60)
    run = write_run(tmp_path, "one", nodes=1, ranks_per_node=1, steps=1)
    followed = History(run)
    with open(run.metrics_path("node-0"), "w", encoding="utf-8") as file:
        for step in range(1, 8001):
            values = {"run_loss": 10 - step / 1e4, "run_evaluation_loss": 1.0}
            file.write(json.dumps({"rank": 0, "step": step, **values}) + "\n")
            if step % 50 == 0:
                file.flush()
                followed.look()
    curves = followed.look()
    assert curves.steps[-1] == 8000
    assert len(curves.steps) <= 60 + 30 + 2
    assert 0.4 < sum(step <= 4000 for step in curves.steps) / len(curves.steps) < 0.6
    assert len(followed._points) <= 240
    assert set(History(run).look().steps) == set(curves.steps)


def test_charts_carry_what_was_planned(tmp_path: Path) -> None:
    run = write_run(tmp_path, "one", nodes=1, steps=5)
    charts = training_charts(History(run).look(), plan_document("one", 400))
    assert charts["step"]["plan"] == STEP_SECONDS
    assert charts["step"]["band"] == [pytest.approx(0.9 * STEP_SECONDS), pytest.approx(1.15 * STEP_SECONDS)]
    assert charts["speed"]["band"][0] < charts["speed"]["plan"] < charts["speed"]["band"][1]
    assert set(training_charts(History(run).look(), {})) == {"loss", "speed", "step", "gradient"}


def status_of(rank: int, **changed: Any) -> RankStatus:
    plain = RankStatus(rank, 1, "productive", (), 4, 0.1, 2.0, False)
    return replace(plain, **changed)


@pytest.mark.parametrize(
    ("change", "health"),
    [({}, "running"), ({"is_stopped": True}, "stopped"), ({"kind": "data", "progress_age_seconds": 120.0}, "stuck")],
)
def test_a_node_is_as_well_as_its_worst_rank(tmp_path: Path, change: dict[str, Any], health: str) -> None:
    run = write_run(tmp_path, "one", nodes=2, ranks_per_node=2)
    write_status(run, NodeStatus(time.time(), 0, "node-1", (status_of(2), status_of(3, **change))))
    views = Nodes(run).look(read_member(run), (), ())
    assert [view.health for view in views] == ["running", health]
    assert ("rank 3" in views[1].reason) == (health != "running")


def test_a_rank_that_saves_a_checkpoint_or_starts_is_not_stuck(tmp_path: Path) -> None:
    run = write_run(tmp_path, "one", nodes=1, ranks_per_node=2)
    ranks = (
        status_of(0, kind="checkpoint", progress_age_seconds=500.0),
        status_of(1, kind="start", progress_age_seconds=500.0),
        status_of(2, progress_age_seconds=60.0, progress_limit_seconds=300.0),  # a command that says so
    )
    write_status(run, NodeStatus(time.time(), 0, "node-0", ranks))
    assert [view.health for view in Nodes(run).look(read_member(run), (), ())] == ["running"]


def test_a_status_that_was_not_replaced_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path, "one", nodes=2, ranks_per_node=2)
    read: list[str] = []

    def note(run: RunDirectory, node: str) -> NodeStatus | None:
        read.append(node)
        return read_status(run, node)

    monkeypatch.setattr(nodes_module, "read_status", note)
    nodes, member = Nodes(run), read_member(run)
    nodes.look(member, (), ())
    assert nodes.status("node-1") == read_status(run, "node-1")
    write_status(run, NodeStatus(time.time(), 0, "node-1", (status_of(2), status_of(3, is_stopped=True))))
    assert [view.ranks for view in nodes.look(member, (), ())] == ["pp", "p!"]
    assert read == ["node-0", "node-1", "node-1"]


def test_a_silent_agent_is_lost_and_a_slow_or_alerted_node_is_told(tmp_path: Path) -> None:
    run = write_run(tmp_path, "one", nodes=4, ranks_per_node=1, leaf_nodes=2)
    nodes, member = Nodes(run), read_member(run)
    nodes.look(member, (), ())
    os.utime(run.heartbeat_path("node-0"), (time.time() - 60,) * 2)
    views = nodes.look(member, {"node-1"}, {"node-2"})
    assert [view.health for view in views] == ["lost", "slow", "alert", "running"]
    drawn = topology(views)
    assert [[node[0] for node in leaf["nodes"]] for leaf in drawn["leaves"]] == [
        ["node-0", "node-1"],
        ["node-2", "node-3"],
    ]


def test_spares_are_shown_and_a_silent_one_is_lost(tmp_path: Path) -> None:
    run = write_run(tmp_path, "one", nodes=2, ranks_per_node=2)
    launch = json.loads(run.launch_path.read_text())
    others = ["node-2", "node-3", "node-4", "node-5"]
    run.launch_path.write_text(json.dumps({**launch, "nodes": [*launch["nodes"], *others]}))
    for node, state in (("node-2", "spare"), ("node-3", "spare"), ("node-4", "released")):  # node-5 has not come yet
        write_heartbeat(run, node, Heartbeat(0, state, 1, 0))  # type: ignore[arg-type]
    os.utime(run.heartbeat_path("node-3"), (time.time() - 28,) * 2)
    nodes = Nodes(run)
    views = nodes.look(read_member(run), (), ())
    spares = [(view.node, view.health, view.ranks) for view in views if view.is_spare]
    assert spares == [("node-2", "spare", ""), ("node-3", "lost", "")]
    assert views[-1].reason == "a spare: its agent was last seen 28 s ago"
    assert [view.health for view in nodes.look(read_member(run), (), {"node-2"})][2] == "alert"
    avoid_node(run, "node-3", "4f2a91c0")  # taken out by `craton heal`
    assert read_member(run).spares == ("node-2", "node-4", "node-5")


def test_a_heartbeat_whose_inode_was_given_again_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path, "one", nodes=1)
    nodes, member = Nodes(run), read_member(run)
    assert [view.health for view in nodes.look(member, (), ())] == ["running"]
    path = run.heartbeat_path("node-0")
    path.write_text(path.read_text().replace("running", "stopped"))  # the same inode with another text
    monkeypatch.setattr(nodes_module, "READ_AGAIN_SECONDS", 0.0)
    assert [view.health for view in nodes.look(member, (), ())] == ["done"]


def test_events_are_news_only_and_checkpoints_are_by_tier(tmp_path: Path) -> None:
    run = write_run(tmp_path, "one", steps=40)
    records = Records(run)
    events = records.look()
    assert [event["step"] for event in events] == [40, 30, 20, 10]
    tiers = {tier.tier: tier for tier in records.tiers(plan_document("one", 400))}
    assert (tiers["nvme"].step, tiers["shared"].step) == (30, 40)
    assert list(tiers) == ["nvme", "shared"]
    assert tiers["nvme"].every_seconds == 300.0
    assert not tiers["nvme"].is_overdue(time.time())
    assert tiers["nvme"].is_overdue(time.time() + 700)
    with open(run.events_path("node-1"), "a", encoding="utf-8") as file:
        line = {
            "time": time.time(),
            "step": 41,
            "event": "checkpoint_failed",
            "tier": "nvme",
            "reason": "disk full",
            "rank": 0,
        }
        file.write(json.dumps(line) + "\n")
    assert records.look()[0]["event"] == "checkpoint_failed"
    assert event_fields(records.look()[0]) == "tier nvme · disk full"
    assert {tier.tier: tier.failures for tier in records.tiers({})} == {"nvme": 1, "shared": 0}


def test_a_tier_saved_long_ago_is_found_and_one_never_saved_is_overdue(tmp_path: Path) -> None:
    run = write_run(tmp_path, "one", steps=5)
    now = time.time()
    with open(run.events_path("node-0"), "w", encoding="utf-8") as file:
        saved = {"event": "checkpoint_saved", "rank": 0, "generation": 0}
        for step in (5, 10):
            file.write(json.dumps({**saved, "time": now - 7200 + step, "tier": "shared", "step": step}) + "\n")
        for step in range(5000):
            file.write(json.dumps({**saved, "time": now - 3600 + step / 2, "tier": "nvme", "step": step}) + "\n")
    records = Records(run)
    records.look()
    tiers = {tier.tier: tier for tier in records.tiers(plan_document("one", 400), now - 7300)}
    assert (tiers["shared"].step, tiers["nvme"].step) == (10, 4999)
    assert tiers["shared"].is_overdue(now)
    run.events_path("node-0").write_text("")
    never = {tier.tier: tier for tier in Records(run).tiers(plan_document("one", 400), now - 1000)}
    assert never["nvme"].moment is None
    assert (never["nvme"].is_overdue(now), never["shared"].is_overdue(now)) == (True, False)


def test_state_in_memory_is_a_tier_although_no_copy_of_it_is_an_event(tmp_path: Path) -> None:
    run = write_run(tmp_path, "one", steps=5)
    now = time.time()
    plan = {"storage": {"tiers": [{"tier": "peer", "every_seconds": 30.0}]}}
    (planned,) = Records(run).tiers(plan, now - 1000)
    assert (planned.tier, planned.every_seconds, planned.is_overdue(now)) == ("peer", 30.0, False)

    def line(moment: float, event: str, **fields: object) -> str:
        return json.dumps({"time": moment, "event": event, "rank": 0, "generation": 0, **fields}) + "\n"

    measured = line(now - 900, "peer_interval", step=3, steps=4, blocked_seconds=0.05)
    restored = line(now - 800, "restored", step=17, tier="peer")
    many = "".join(line(now - 700, "checkpoint_saved", step=step, tier="nvme") for step in range(1000))
    for text in (measured + restored, measured + restored + many):  # at the end of the file, and far before it
        run.events_path("node-0").write_text(text)
        records = Records(run)
        records.look()
        peer = records.tiers(plan, now - 1000)[0]
        assert (peer.step, peer.every_steps, peer.seconds, peer.off) == (17, 4, 0.05, "")
        assert not peer.is_overdue(now)
        html = render("parts/checkpoints.html", tiers=[peer], now=now, is_moving=True)
        assert "restored 13m ago" in html
        assert "4 steps" in html
    with open(run.events_path("node-0"), "a", encoding="utf-8") as file:
        file.write(line(now, "peer_off", step=20, reason="node-0 has no memory for it"))
    records.look()
    peer = records.tiers(plan)[0]
    assert (peer.off, peer.every_steps) == ("node-0 has no memory for it", None)


def test_a_log_is_read_from_its_end_and_then_on(tmp_path: Path) -> None:
    run = write_run(tmp_path, "one")
    assert sources(run)[0] == "rank-00000.log"
    path = run.log_path(0)
    path.write_text("".join(f"line {number}\n" for number in range(20_000)) + "half")
    piece = read_piece(run, path.name, None)
    assert piece is not None
    assert len(piece.text) <= PIECE_BYTES
    assert piece.text.startswith("line ")
    assert piece.text.endswith("line 19999\n")
    with open(path, "a") as file:
        file.write(" a line\n")
    after = read_piece(run, path.name, piece.end)
    assert after is not None
    assert after.text == "half a line\n"
    path.write_text("new\n")  # it was begun anew
    again = read_piece(run, path.name, after.end)
    assert again is not None
    assert (again.text, again.begin) == ("new\n", 0)


def test_the_last_words_of_a_log_need_no_end_of_line_and_a_pipe_is_no_log(tmp_path: Path) -> None:
    run = write_run(tmp_path, "one", steps=3)
    run.log_path(0).write_text("began\nSegmentation fau")
    piece = read_piece(run, "rank-00000.log", None)
    assert piece is not None
    assert (piece.text, piece.rest, piece.end) == ("began\n", "Segmentation fau", 6)
    with open(run.log_path(0), "a", encoding="utf-8") as file:
        file.write("lt\n")
    piece = read_piece(run, "rank-00000.log", piece.end)
    assert piece is not None
    assert (piece.text, piece.rest) == ("Segmentation fault\n", "")
    os.mkfifo(run.path / "logs" / "rank-00077.log")
    assert read_piece(run, "rank-00077.log", None) is None


def metrics_of(requests: int, first_token_bucket: str, waiting: int = 0) -> str:
    bounds = ("0.1", "0.5", "1.0", "+Inf")
    counts = {bound: (requests if bounds.index(bound) >= bounds.index(first_token_bucket) else 0) for bound in bounds}
    lines = ["# TYPE vllm:time_to_first_token_seconds histogram"]
    lines += [f'vllm:time_to_first_token_seconds_bucket{{le="{bound}"}} {count}' for bound, count in counts.items()]
    lines += [f"vllm:time_to_first_token_seconds_count {requests}", "vllm:time_to_first_token_seconds_sum 1"]
    lines += ["# TYPE vllm:num_requests_waiting gauge", f"vllm:num_requests_waiting {waiting}"]
    lines += ["# TYPE vllm:kv_cache_usage_perc gauge", "vllm:kv_cache_usage_perc 0.25"]
    lines += ["# TYPE vllm:generation_tokens counter", f"vllm:generation_tokens_total {100 * requests}"]
    return "\n".join(lines) + "\n"


def test_latencies_are_of_the_last_minute() -> None:
    server = ServerLooks(ServerAddress("127.0.0.1", 1))
    server.take(metrics_of(1000, "0.1"), 0.0)
    later = server.take(
        metrics_of(1010, "0.1").replace('le="0.1"} 1010', 'le="0.1"} 1000').replace('le="0.5"} 1010', 'le="0.5"} 1000'),
        10.0,
    )
    median, late = later.quantiles["first_token"]
    assert median is not None
    assert late is not None
    assert 0.5 < median <= late <= 1.0
    assert later.tokens_per_second == pytest.approx(100.0)
    assert later.kv_share == 0.25
    restarted = server.take(metrics_of(4, "0.1", waiting=3), 12.0)
    assert restarted.waiting == 3
    assert restarted.tokens_per_second is None
    assert len(look_curves(list(server.history))["seconds"]) == 3
    assert restarted.quantiles["first_token"] == (None, None)  # nobody has asked since


def test_the_fullest_of_several_engines_is_told() -> None:
    lines = [f'vllm:kv_cache_usage_perc{{engine="{number}"}} 0.{number}' for number in (3, 6, 5)]
    lines += [f'vllm:num_requests_running{{engine="{number}"}} 2' for number in (3, 6, 5)]
    look = ServerLooks(ServerAddress("127.0.0.1", 1)).take("\n".join(lines) + "\n", 0.0)
    assert (look.kv_share, look.running) == (0.6, 6)


def test_a_quantile_of_nothing_is_none() -> None:
    assert histogram_quantile([], 0.5) is None
    assert histogram_quantile([(1.0, 0.0), (float("inf"), 0.0)], 0.5) is None
    assert histogram_quantile([(1.0, 10.0), (float("inf"), 10.0)], 0.5) == pytest.approx(0.5)
