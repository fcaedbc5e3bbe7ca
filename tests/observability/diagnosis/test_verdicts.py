"""What `diagnose` says of runs with one fault, with two, and with none that can be told."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from fake_snapshots import (
    MOMENT,
    asked_ras,
    healthy,
    hung,
    slowed,
    slowed_all,
    with_gpu,
    with_host,
    with_log,
    with_mount,
    with_node,
    with_rank,
    with_ranks,
    with_run,
    with_scheduler,
    with_tier,
    without_hardware,
)
from sick import Case, cases
from sick_runs import GPU, NODE, RANK, dead, restarted, serving, slow_victim, unmeasured, with_losses

from craton.observability.diagnosis import LAYERS, diagnose, straggler_of
from craton.observability.diagnosis.snapshot import Snapshot, SnapshotNode, SnapshotXid
from craton.observability.diagnosis.symptoms import symptoms_of
from craton.observability.diagnosis.tables import causes
from craton.observability.healing.issues import of_verdict

CASES = list(cases())


@pytest.mark.parametrize("case", CASES, ids=[f"{case.cause}: {case.name}" for case in CASES])
def test_a_fault_is_found(case: Case) -> None:
    verdict = diagnose(case.snapshot)
    assert (verdict.condition, verdict.cause) == (case.condition, case.cause), verdict.sentence
    assert verdict.layer == causes()[case.cause].layer
    assert verdict.node == case.node, verdict.sentence
    if case.rank is not None or verdict.condition != "hung":
        assert verdict.rank == case.rank, verdict.sentence
    assert 0.3 < verdict.confidence <= 0.97
    assert verdict.because
    assert verdict.action
    assert not any(name in verdict.sentence for name in ("{node}", "{who}", "{logs}", "{run}", "{{"))
    # Of ranks, an action names those that it is about, or 0 where that is whose affair it is.
    about = {verdict.rank, *symptoms_of(case.snapshot).first.ranks}
    named = set(map(int, re.findall(r"rank (\d+)", verdict.action)))
    assert named <= about or "rank 0" in causes()[case.cause].action, verdict.action
    assert "RUN" not in verdict.action
    assert Snapshot.from_json(case.snapshot.to_json()).to_json() == case.snapshot.to_json()


def test_every_cause_of_the_table_has_a_case() -> None:
    assert {case.cause for case in CASES} == set(causes())
    assert {cause.layer for cause in causes().values()} == set(LAYERS)


def test_the_slow_rank_is_the_one_that_waits_least() -> None:
    waits = with_rank(healthy(4), RANK, recent={**healthy(4).ranks[RANK].recent, "communication": 0.6})
    assert diagnose(waits).condition == "healthy"  # it waits more than others: nobody waits for it
    verdict = diagnose(slow_victim())
    assert verdict.rank == RANK
    assert f" Most likely cause: framework (rank {RANK} on {NODE}): " in verdict.sentence
    assert "waits least" in " ".join(verdict.evidence)


def test_ranks_of_different_pipeline_stages_are_not_compared() -> None:
    layout = {"pp": 2, "replicate": 1, "fsdp": 16, "cp": 1, "tp": 1, "ep": 1}
    uneven = slowed(healthy(4, layout=layout), dict.fromkeys(range(16), 1.4), since_start=True)
    uneven = with_run(uneven, step_seconds_high=2.0)
    assert diagnose(uneven).condition == "healthy"
    assert diagnose(with_run(uneven, layout={"pp": 1, "fsdp": 32})).condition == "slow"


@pytest.mark.parametrize(
    ("snapshot", "first", "second"),
    [
        (
            with_mount(
                with_gpu(
                    slowed(slowed_all(healthy(4), 25.0, "data"), {RANK: 1.4}), NODE, GPU, throttle=("hw_slowdown",)
                ),
                "/fsx",
                operation_seconds=0.4,
            ),
            "gpu_throttled",
            "storage_slow",
        ),
        (
            with_tier(with_gpu(slow_victim(), NODE, GPU, throttled_share=0.5), "shared", failures=4),
            "gpu_throttled",
            "checkpoint_failing",
        ),
        (
            with_gpu(
                with_rank(hung(healthy(4), {RANK: "data"}), RANK, is_stopped=True), "node-3", 0, remap_failed=True
            ),
            "rank_stopped",
            "gpu_memory_error",
        ),
        (
            with_node(with_host(dead(-9), NODE, out_of_memory_kills=2), "node-3", nccl_network="Socket"),
            "out_of_memory",
            "tcp_fallback",
        ),
    ],
    ids=["slow twice", "slow and unsaved", "hung and worn", "dead and on sockets"],
)
def test_two_faults_are_both_told(snapshot: Snapshot, first: str, second: str) -> None:
    verdict = diagnose(snapshot)
    assert verdict.cause == first, verdict.sentence
    assert second in [each.cause for each in verdict.others], verdict.sentence
    assert "Also found: " in verdict.sentence


def test_what_a_death_brings_with_it_is_not_told_as_another_fault() -> None:
    died = with_log(
        with_gpu(dead(), NODE, GPU, xids=(SnapshotXid(79, MOMENT - 9.0),)), "exception", "RuntimeError: lost", RANK
    )
    died = with_log(died, "peer_closed", "Connection closed by peer", 3)
    verdict = diagnose(died)
    assert verdict.cause == "gpu_lost"
    assert [each.cause for each in verdict.others] == []


def test_a_fault_somewhere_else_does_not_explain_a_straggler() -> None:
    verdict = diagnose(with_gpu(slow_victim(), "node-3", 6, throttle=("hw_thermal_slowdown",), throttled_share=0.1))
    assert (verdict.cause, verdict.rank) == ("straggler", RANK)
    assert [each.cause for each in verdict.others] == ["gpu_throttled"]


@pytest.mark.parametrize(
    ("name", "snapshot", "condition"),
    [
        ("all stand in one collective", hung(healthy(4)), "hung"),
        ("nobody tells of anything", without_hardware(hung(healthy(4))), "hung"),
        ("counts are equal", asked_ras(hung(healthy(4))), "hung"),
        ("no metric comes", with_run(unmeasured(healthy(4)), updated_at=MOMENT - 7200.0), "hung"),
        ("it ended without a word", with_run(healthy(4), state="failed", message=""), "dead"),
    ],
)
def test_it_cannot_be_told_and_what_would_tell(name: str, snapshot: Snapshot, condition: str) -> None:
    if name == "no metric comes":
        ranks = tuple(replace(rank, progress_age_seconds=None, kind="") for rank in snapshot.ranks)
        snapshot = replace(snapshot, ranks=ranks)
    verdict = diagnose(snapshot)
    assert (verdict.condition, verdict.cause, verdict.layer) == (condition, "cannot_tell", ""), verdict.sentence
    assert verdict.would_tell
    assert f"Not enough evidence to name a layer. To narrow it down: {verdict.would_tell[0]}" in verdict.sentence


def test_a_run_that_is_not_whole_says_what_its_scheduler_says_of_the_rest() -> None:
    told = "3 of 4 pods find no node: too few nvidia.com/gpu on 2 nodes"
    assert diagnose(with_run(healthy(2), state="starting", message=told)).sentence.endswith(f" is starting: {told}.")
    assert diagnose(with_run(healthy(2), state="starting")).sentence.endswith(" is starting.")


def test_a_scheduler_that_cannot_be_asked_makes_a_lost_run_unknown() -> None:
    lost = with_scheduler(with_run(healthy(2), state="lost"), condition="unknown", sentence="squeue timed out")
    verdict = diagnose(lost)
    assert (verdict.condition, verdict.cause) == ("unknown", "cannot_tell")
    assert verdict.sentence == "llama-8b: squeue timed out"


def test_a_node_that_was_lost_and_started_anew_is_guilty_and_not_those_whose_connections_broke() -> None:
    words = "rank {0} on node-0 exited with code 1 (generation 0): ConnectionError: Connection closed by peer"
    ends = "the end of rank-00000.log:\n  nothing is lost: at all"
    lost = "node-1 is lost: its agent is gone; node-1 is lost: its agent was started anew"
    message = f"{words.format(0)}\n{ends}; {words.format(1)}; {lost}"
    broken = healthy(2)
    for rank in (0, 1):
        broken = with_rank(broken, rank, is_alive=False, exit_code=1, ended_at=MOMENT - 5.0)
        broken = with_log(broken, "peer_closed", "ConnectionError: Connection closed by peer", rank, "node-0")
    verdict = diagnose(with_run(broken, state="failed", message=message))
    assert (verdict.cause, verdict.layer, verdict.node) == ("node_lost", "host", "node-1"), verdict.sentence
    assert "node-1 was lost: its agent is gone" in verdict.sentence
    alone = diagnose(with_run(broken, state="failed", message=words.format(0)))
    assert alone.node == "node-0", alone.sentence


def test_it_costs_what_is_lost_of_what_the_nodes_cost() -> None:
    verdict = diagnose(slowed(healthy(4, dollars_per_hour=100.0), {RANK: 1.5}))
    assert verdict.lost_share == pytest.approx(0.286, abs=0.02)
    assert verdict.cost_dollars_per_day == pytest.approx(100.0 * 24.0 * 0.286, rel=0.05)
    assert f"${verdict.cost_dollars_per_day:,.0f} a day" in verdict.sentence
    assert diagnose(hung(healthy(4, dollars_per_hour=100.0))).cost_dollars_per_day == pytest.approx(2400.0)
    assert diagnose(with_run(hung(healthy(4)), dollars_per_hour=None)).cost_dollars_per_day is None
    assert diagnose(healthy(4)).cost_dollars_per_day is None


def test_better_evidence_makes_a_verdict_surer() -> None:
    plain = diagnose(hung(healthy(4), {RANK: "productive"}))
    counted = diagnose(asked_ras(hung(healthy(4), {RANK: "productive"}), {RANK: 1}))
    fallen = diagnose(
        with_gpu(hung(healthy(4), {RANK: "productive"}), NODE, GPU, xids=(SnapshotXid(79, MOMENT - 900.0),))
    )
    assert plain.confidence < counted.confidence < fallen.confidence
    assert {plain.rank, counted.rank, fallen.rank} == {RANK}


def test_old_errors_of_a_card_are_no_explanation() -> None:
    old = with_gpu(hung(healthy(4), {RANK: "productive"}), NODE, GPU, xids=(SnapshotXid(79, MOMENT - 90_000.0),))
    assert diagnose(old).cause == "rank_hung"
    reloaded = (SnapshotXid(79, MOMENT - 900.0, before_reload=True),)
    assert diagnose(with_gpu(hung(healthy(4), {RANK: "data"}), NODE, GPU, xids=reloaded)).cause != "gpu_lost"


def test_what_the_driver_asks_for_is_told() -> None:
    asked = (SnapshotXid(119, MOMENT - 900.0), SnapshotXid(154, MOMENT - 899.0, recovery="Node Reboot Required"))
    verdict = diagnose(with_gpu(hung(healthy(4), {RANK: "productive"}), NODE, GPU, xids=asked))
    assert verdict.cause == "gpu_error"
    assert "the driver requests: Node Reboot Required" in verdict.evidence


@pytest.mark.parametrize(("code", "ago"), [(79, 90.0), (119, 90.0), (95, 130.0), (79, 590.0)])
def test_what_ended_the_last_generation_is_remembered(code: int, ago: float) -> None:
    run = restarted(f"rank {RANK} on {NODE} hangs in productive at step 40: no progress for 75.0 s")
    began = MOMENT - 55.0
    sick = with_gpu(run, NODE, GPU, xids=(SnapshotXid(code, began - ago),))
    verdict = diagnose(sick)
    assert (verdict.condition, verdict.layer, verdict.rank) == ("healthy", "device", RANK)
    assert not verdict.is_urgent  # nobody could take the node's place
    spare = SnapshotNode("node-9", heartbeat_state="spare", heartbeat_age_seconds=0.5)
    urgent = diagnose(replace(sick, spares=(spare,)))
    assert urgent.is_urgent
    (trouble,) = of_verdict(urgent, {NODE: NODE})
    assert (trouble.node, trouble.is_urgent) == (NODE, True)
    (patient,) = of_verdict(verdict, {NODE: NODE})
    assert not patient.is_urgent
    first = with_run(sick, previous_began=None)  # nothing of this run was there before
    assert (diagnose(first).cause == "") == (ago > 60.0)
    reloaded = (SnapshotXid(code, began - ago, before_reload=True),)
    assert diagnose(with_gpu(run, NODE, GPU, xids=reloaded)).cause == ""


def test_of_several_ranks_one_that_hangs_is_to_be_looked_at() -> None:
    run = hung(healthy(4), dict.fromkeys(range(16, 24), "productive"))
    assert "the stack of rank 16 on node-2" in diagnose(run).action
    all_ended = with_ranks(healthy(4), lambda rank: replace(rank, is_alive=False, exit_code=-15, ended_in="productive"))
    nobody = with_run(all_ended, state="failed", message="rank 1 hangs in productive at step 46: no progress for 4.0 s")
    assert "the stack of its ranks on its node" in diagnose(nobody).action
    full = with_mount(healthy(4), "/fsx", full_share=0.98)
    assert "`craton resume llama-8b`" in diagnose(full).action


def test_a_dead_run_costs_what_its_nodes_do_while_it_holds_them() -> None:
    silent = with_node(healthy(4, dollars_per_hour=100.0), NODE, heartbeat_age_seconds=900.0)
    verdict = diagnose(silent)
    assert (verdict.condition, verdict.cost_dollars_per_day) == ("dead", 2400.0)
    assert "It costs $2.40k a day." in verdict.sentence
    assert diagnose(with_run(silent, state="failed")).cost_dollars_per_day is None


def test_a_jump_of_the_loss_costs_nothing_yet() -> None:
    verdict = diagnose(with_losses(lambda place, value: value * 3 if place > 10 else value))
    assert (verdict.cause, verdict.cost_dollars_per_day) == ("loss_spike", 0.0)
    assert "It costs" not in verdict.sentence


def test_a_run_that_breaks_again_and_again() -> None:
    reasons = [f"rank {RANK} on {NODE} was killed by SIGKILL; the kernel does that"] * 4
    verdict = diagnose(restarted(*reasons))
    assert verdict.lost_share == pytest.approx(60.0 / 240.0)
    assert "is in a restart loop: it restarted 4 times in 4m, which cost 25% of that time" in verdict.sentence
    assert diagnose(restarted(*reasons[:3])).condition == "healthy"  # so often it may break
    assert straggler_of(restarted(*reasons)) is None  # its steps are as quick as the others'
    # A crowd makes steps longer, and ends nobody.
    crowded = with_host(restarted(*reasons), NODE, processor_pressure=0.9, foreign_processor_share=0.8)
    assert diagnose(crowded).cause == "killed_again"
    anybody = [f"rank {rank} on node-{rank // 8} was killed by SIGKILL" for rank in (1, 9, 17, 25)]
    nobody = diagnose(restarted(*anybody))
    assert (nobody.cause, nobody.node, nobody.rank) == ("killed_again", "", None)
    # What others say because their peer is gone does not make it the program's fault.
    echo = with_log(restarted(*reasons), "exception", "RuntimeError: peer gone", 3)
    assert diagnose(echo).layer == "host"


def test_a_crowd_beside_a_server_is_not_why_requests_wait() -> None:
    """It makes steps longer; how many requests come, it does not."""
    crowded = with_host(serving(), "node-0", processor_pressure=0.93, foreign_processor_share=0.8)
    assert diagnose(crowded).cause == "server_overloaded"


def test_a_queue_that_empties_is_no_overload() -> None:
    assert diagnose(serving(least_waiting=0)).condition == "healthy"
    assert diagnose(serving(least_waiting=None)).condition == "healthy"
    verdict = diagnose(serving(waiting=3))
    assert verdict.condition == "healthy"
    assert "16 requests running, 3 waiting" in verdict.sentence
