"""What is decided about which node: pure, without a cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import fake_snapshots as building
import pytest

from craton.infrastructure.probes import HEALTH_ACTIONS
from craton.observability.diagnosis import Verdict, diagnose
from craton.observability.diagnosis.snapshot import SnapshotXid
from craton.observability.diagnosis.tables import causes
from craton.observability.diagnosis.verdict import Finding
from craton.observability.healing import Decision
from craton.observability.healing.issues import Issue, of_doctor, of_verdict, rules
from craton.observability.healing.ledger import LedgerEntry
from craton.observability.healing.policy import decide, max_out
from craton.orchestration import ServiceNode
from craton.orchestration.changes import Evacuation

NOW = 1_000_000_000.0
DAY = 86400.0
LEAVES = ("reset", "reboot", "replace")
NAMES = [f"g{number}" for number in range(1, 11)]


def nodes(out: dict[str, str] | None = None, busy: tuple[str, ...] = (), count: int = 10) -> list[ServiceNode]:
    """`out`: node → reason."""
    gone = out or {}
    return [
        ServiceNode(name, name in gone, gone.get(name, ""), name in busy, gone.get(name, "").partition("craton:")[2])
        for name in NAMES[:count]
    ]


def issue(node: str = "g1", action: Any = "reboot", **more: Any) -> Issue:
    return Issue(node, action, **{"what": "xid", "evidence": "GPU 3 (0000:53:00.0): XID 79", **more})


def incident(node: str = "g1", days: float = 3.0, action: str = "reset", **more: Any) -> LedgerEntry:
    return LedgerEntry(NOW - days * DAY, "incident", node, action=action, **more)


def decided(*issues: Issue, **more: Any) -> list[Decision]:
    given: dict[str, Any] = {"nodes": nodes(), "history": [], "now": NOW, "share": 0.1, **more}
    return decide(issues, **given)


def way(run: str, how: str = "requeue") -> Evacuation:
    return Evacuation(run, "node-0", how, "it saves and leaves" if how else f"{run} has no spare")


@pytest.mark.parametrize(
    ("action", "expected"),
    [("observe", "none"), ("restart", "none"), ("reset", "take_out"), ("reboot", "take_out"), ("replace", "take_out")],
)
def test_a_node_leaves_service_for_a_reset_and_more(action: str, expected: str) -> None:
    (found,) = decided(issue(action=action))
    assert (found.action, found.node_action, found.why_not) == (action, expected, "")


def test_json_keeps_its_names() -> None:
    (found,) = decided(issue())
    document = found.to_json()
    assert (document["action"], document["deed"], document["trouble"]["what"]) == ("reboot", "take_out", "xid")
    assert not {"node_action", "issue"} & set(document)


def test_the_gravest_issue_of_a_node_decides_and_all_evidence_is_kept() -> None:
    (found,) = decided(issue(action="reset", evidence="ECC"), issue(action="replace", evidence="rows"))
    assert (found.action, found.reason, found.evidence) == ("replace", "rows", ("ECC", "rows"))


def test_runs_on_the_node_move() -> None:
    (found,) = decided(issue(), runs_on={"g1": [way("llama")], "g2": [way("other")]})
    assert found.runs == ("llama",)


@pytest.mark.parametrize(
    ("total", "share", "most"),
    [
        (10, 0.1, 1),
        (10, 0.3, 3),
        (8, 0.1, 0),
        (8, 0.125, 1),
        (100, 0.29, 29),
        (3, 1.0, 3),
        (0, 0.5, 0),
        (1000, 0.07, 70),
    ],
)
def test_a_share_is_never_rounded_up(total: int, share: float, most: int) -> None:
    assert max_out(total, share) == most


def test_no_more_than_the_share_goes_and_the_gravest_go_first() -> None:
    found = decided(
        issue("g1", "reset"), issue("g2", "replace"), issue("g3", "reboot"), issue("g4", "observe"), share=0.2
    )
    assert [(each.node, each.node_action) for each in found] == [
        ("g2", "take_out"),
        ("g3", "take_out"),
        ("g1", "none"),
        ("g4", "none"),
    ]
    held = found[2]
    assert held.is_held
    assert "2 of 10 nodes are out already" in held.why_not
    assert "--share 30%" in held.why_not
    assert not found[3].is_held


@pytest.mark.parametrize("reason", ["not responding", "memory", "craton:ab12 reboot", "Action:Replace"])
def test_nodes_that_are_out_for_any_reason_count(reason: str) -> None:
    (found,) = decided(issue("g1"), nodes=nodes({"g7": reason}))
    assert found.node_action == "none"
    assert "1 of 10 nodes are out already" in found.why_not


def test_a_small_cluster_is_told_which_share_it_takes() -> None:
    (found,) = decided(issue("g1"), nodes=nodes(count=8))
    assert found.node_action == "none"
    assert "--share 13%" in found.why_not
    (found,) = decided(issue("g1"), nodes=nodes(count=8), share=0.13)
    assert found.node_action == "take_out"


@pytest.mark.parametrize("seed", range(20))
def test_whatever_ails_a_cluster_never_more_than_the_share_is_out(seed: int) -> None:
    import random

    chance = random.Random(seed)
    names = [f"n{number}" for number in range(chance.randint(1, 60))]
    out = set(chance.sample(names, chance.randint(0, len(names) // 4)))
    share = chance.choice([0.05, 0.1, 0.25, 0.5, 1.0])
    issues = [issue(chance.choice(names), chance.choice(HEALTH_ACTIONS)) for _ in range(chance.randint(0, 80))]
    there = [ServiceNode(name, name in out, "other" if name in out else "", chance.random() < 0.5) for name in names]
    found = decide(issues, there, [], NOW, share)
    taken = [each.node for each in found if each.node_action == "take_out"]
    assert len(taken) == len(set(taken))
    assert not set(taken) & out
    assert not taken or len(taken) + len(out) <= share * len(names)
    assert {each.node for each in found} == {each.node for each in issues}


def test_a_node_that_is_out_already_is_left_alone() -> None:
    (theirs,) = decided(issue("g1"), nodes=nodes({"g1": "broken fan"}))
    (ours,) = decided(issue("g1"), nodes=nodes({"g1": "craton:ab12"}))
    assert (theirs.node_action, theirs.mark, theirs.is_held) == ("none", "", False)
    assert (ours.node_action, ours.mark, ours.is_held) == ("none", "ab12", False)


def test_an_unknown_node_is_not_touched() -> None:
    (found,) = decided(issue("login-1"))
    assert found.why_not == "the scheduler has no node login-1 here: it is in another partition, powered down or gone"


def test_what_can_wait_waits_for_the_node_to_be_idle() -> None:
    row = issue(action="reset", what="gpu_row_remap", evidence="a row waits", is_urgent=False)
    (busy,) = decided(row, nodes=nodes(busy=("g1",)))
    (idle,) = decided(row)
    assert (busy.node_action, busy.why_not) == ("none", "it can wait until the node is idle")
    assert idle.node_action == "take_out"
    (urgent,) = decided(row, issue(action="reset"), nodes=nodes(busy=("g1",)))
    assert urgent.node_action == "take_out"


def test_a_verdict_that_is_not_sure_touches_nothing() -> None:
    (found,) = decided(issue(confidence=0.6))
    assert (found.action, found.node_action) == ("observe", "none")
    assert "the confidence (60%) is too low" in found.reason
    (found,) = decided(issue(confidence=0.6, evidence="a guess"), issue(action="reset", evidence="ECC"))
    assert (found.action, found.reason) == ("reset", "ECC"), "what is sure decides"


# -- repeat offenders ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "episodes", "expected"),
    [
        ("reset", 0, "reset"),
        ("reset", 1, "reboot"),
        ("reboot", 1, "replace"),
        ("reset", 2, "replace"),
        ("replace", 5, "replace"),
    ],
)
def test_a_node_that_comes_back_is_a_repeat_offender(first: Any, episodes: int, expected: str) -> None:
    history = [incident(days=2.0 + number) for number in range(episodes)]
    (found,) = decided(issue(action=first), history=history)
    assert found.action == expected
    assert found.escalated_from == ("" if first == expected else first)
    assert ("before in 30 days" in found.reason) == bool(episodes)


def test_old_troubles_and_those_of_others_do_not_count() -> None:
    history = [incident(days=31), incident(days=40), incident("g2"), incident(days=2, action="observe")]
    (found,) = decided(issue(action="reset"), history=history)
    assert found.action == "reset"


def test_one_trouble_seen_again_and_again_is_one() -> None:
    history = [incident(days=minutes / 1440, run="llama") for minutes in (50, 40, 30, 20, 10)]
    (found,) = decided(issue(action="reset", run="llama"), history=history)
    assert found.action == "reset"
    (found,) = decided(issue(action="reset", run="gemma"), history=history)
    assert found.action == "reboot", "another job met the same node"


def test_what_happens_after_it_was_given_back_is_new_and_what_only_lasts_is_not() -> None:
    history = [incident(days=2 / 24), LedgerEntry(NOW - 3600, "undo", "g1", "ab12")]
    (found,) = decided(issue(action="reset"), history=history)
    assert found.action == "reset"
    (found,) = decided(issue(action="reset", moment=NOW - 60), history=history)
    assert found.action == "reboot"


@pytest.mark.parametrize(
    ("given", "undone_hours", "expected"),
    [
        ({"moment": NOW - 7200}, 1, "none"),  # happened before it was given back
        ({"moment": NOW - 1800}, 1, "take_out"),
        ({"moment": NOW - 7200, "device": "GPU 7"}, 1, "none"),  # seen by whoever gave it back, too
        ({}, 1, "none"),  # lasts
        ({}, 25, "take_out"),
        ({"device": "GPU 7"}, 1, "take_out"),  # another card
        ({"what": "nvlink"}, 1, "take_out"),
    ],
)
def test_what_a_node_was_given_back_in_spite_of_is_watched(given: Any, undone_hours: float, expected: str) -> None:
    undo = LedgerEntry(NOW - undone_hours * 3600, "undo", "g1", "ab12", what="xid", device="GPU 3")
    (found,) = decided(issue(**{"device": "GPU 3", **given}), history=[undo])
    assert found.node_action == expected
    assert ("put back in service since" in found.reason) == (expected == "none")


def test_one_event_that_two_saw_at_different_times_is_one() -> None:
    seen = issue(action="reset", device="GPU 3", moment=NOW - 10 * 3600)
    history = [incident(days=9 / 24, run="llama", moment=NOW - 10 * 3600 + 5)]
    assert [each.action for each in decided(seen, history=history)] == ["reset"]
    history = [incident(days=9 / 24, run="llama", moment=NOW - 20 * 3600)]
    assert [each.action for each in decided(seen, history=history)] == ["reboot"]


# -- samples, and runs that do well -----------------------------------------------------------------------------------


def test_what_may_pass_is_seen_in_several_looks_before_a_node_is_touched() -> None:
    sample = issue(what="gpu_clock_low", evidence="GPU 3 runs at 600 MHz", device="GPU 3", is_sample=True)

    def look(*minutes: float, **more: Any) -> Decision:
        seen = {"action": "observe", "what": "gpu_clock_low", "device": "GPU 3", **more}
        (found,) = decided(sample, history=[incident(days=each / 1440, **seen) for each in minutes])
        return found

    assert (look().action, look().node_action) == ("observe", "none")
    assert "seen in 1 of 3 looks" in look().reason
    assert look(5).node_action == "none"
    assert look(10, 5).node_action == "take_out"
    assert look(6, 1).node_action == "none", "two looks within a minute are one"
    assert look(90, 60).node_action == "none", "long ago"
    assert look(10, 5, device="GPU 4").node_action == "none"
    (found,) = decided(issue(action="restart"), sample)
    assert found.issue == sample, "it is remembered for the next look"


@pytest.mark.parametrize(
    ("cause", "health", "expected"),
    [
        ("gpu_throttled", "", "observe"),
        ("link_down", "", "observe"),
        ("gpu_lost", "", "reboot"),
        ("gpu_memory_error", "restart", "restart"),
        ("gpu_memory_error", "replace", "replace"),
        ("rank_failed", "observe", "observe"),
    ],
)
def test_a_run_that_does_well_keeps_its_nodes(cause: str, health: str, expected: str) -> None:
    risk = Verdict("healthy", "device", "node-0", cause=cause, because="GPU 3", confidence=0.95, health=health)
    (found,) = of_verdict(risk, {"node-0": "g1"}, "llama")
    assert (found.action, found.is_urgent, found.is_sample) == (expected, False, not health)
    (decision,) = decided(found, nodes=nodes(busy=("g1",)))
    assert decision.node_action == "none"


def test_what_stops_a_run_needs_no_second_look_and_the_rest_does() -> None:
    other = Finding("nvlink_down", (), 0.9, "NVLinks of node-1 are down", node="node-1", symptom=1)
    for condition, samples in {"dead": [False, True], "hung": [False, True], "slow": [True, True]}.items():
        verdict = Verdict(condition, "device", "node-0", cause="gpu_lost", confidence=0.95, others=(other,))  # type: ignore[arg-type]
        found = of_verdict(verdict, {"node-0": "g1", "node-1": "g2"}, "llama")
        assert [each.is_sample for each in found] == samples
        assert [each.stops_run for each in found] == [not samples[0], False]
        assert all(each.is_urgent for each in found)


def test_a_run_leaves_no_node_at_once_for_what_does_not_hurt_it() -> None:
    sick = building.with_gpu(building.healthy(2, 8), "node-1", 3, uncorrectable_errors=1)
    verdict = diagnose(building.slowed_all(sick, 100.0, "data"))
    assert (verdict.condition, verdict.cause) == ("slow", "loader_slow"), verdict
    (found,) = of_verdict(verdict, {"node-1": "g1"}, "llama")
    assert (found.what, found.action, found.is_urgent) == ("gpu_memory_error", "reset", False)
    (busy,) = decided(found, nodes=nodes(busy=("g1",)), runs_on={"g1": [way("llama")]})
    (idle,) = decided(found)
    assert (busy.node_action, busy.why_not, idle.node_action) == (
        "none",
        "it can wait until the node is idle",
        "take_out",
    )


def test_something_graver_that_can_wait_holds_up_nothing_that_cannot() -> None:
    slow, hung = issue(action="reset", device="GPU 1"), issue(action="reset", device="GPU 1", stops_run=True)
    later = issue(action="replace", what="gpu_memory", evidence="rows", is_urgent=False)
    everybody = tuple(NAMES)
    (found,) = decided(slow, later, nodes=nodes(busy=everybody))
    assert (found.action, found.node_action) == ("replace", "take_out")
    (found,) = decided(hung, later, nodes=nodes(busy=everybody), runs_on={"g1": [way("llama")]})
    assert found.node_action == "take_out", "a run that does not move has nothing to lose"


def test_an_xid_of_a_verdict_has_the_moment_it_happened() -> None:
    well = building.healthy(2, 8)
    for code in (31, 48):
        sick = building.with_gpu(well, "node-1", 0, xids=(SnapshotXid(code, well.moment - 5),))
        found = of_verdict(diagnose(building.hung(sick, {8: "compute"})), {"node-1": "g1"}, "llama")
        assert (found[0].moment, found[0].device) == (well.moment - 5, "GPU 0"), found


def test_a_run_that_ended_says_when_and_its_node_may_be_in_use_again() -> None:
    verdict = Verdict("dead", "device", "node-0", cause="gpu_lost", confidence=0.95)
    (found,) = of_verdict(verdict, {"node-0": "g1"}, "llama", ended=NOW - 60)
    assert (found.moment, found.is_urgent, found.stops_run) == (NOW - 60, False, False)


def test_gradients_alone_replace_no_node_and_a_job_that_leaves_devices_out_blames_none() -> None:
    sick = building.healthy(4, 8)
    norm = building.with_rank(sick, 5, gradient_norm=(sick.rank(5).gradient_norm_usual or 1.0) * 6)  # type: ignore[union-attr]
    fewer = building.with_nodes(sick, lambda node: replace(node, nccl_interfaces=1))
    flapped = building.with_device(sick, "node-1", 0, link_downs=1.0)
    hosts = {node.name: node.name for node in sick.nodes}
    for snapshot in (norm, fewer, flapped):
        for slow in (snapshot, building.slowed_all(snapshot, 3.0, "communication")):
            found = of_verdict(diagnose(slow), hosts, "llama")
            assert {each.action for each in found} <= {"observe"}, found


# -- runs that have to go ---------------------------------------------------------------------------------------------


def test_a_run_that_moves_gives_its_nodes_back_only_where_there_are_others() -> None:
    everybody = tuple(NAMES)
    (held,) = decided(issue(), nodes=nodes(busy=everybody), runs_on={"g1": [way("llama")]})
    assert (held.node_action, held.is_held) == ("none", True)
    assert "it needs 1 other idle node, and 0 are" in held.why_not
    (spared,) = decided(issue(), nodes=nodes(busy=everybody), runs_on={"g1": [way("llama", "spare")]})
    (idle,) = decided(issue(), nodes=nodes(busy=everybody[:-1]), runs_on={"g1": [way("llama")]})
    (hung,) = decided(issue(stops_run=True), nodes=nodes(busy=everybody), runs_on={"g1": [way("llama")]})
    assert [each.node_action for each in (spared, idle, hung)] == ["take_out"] * 3
    unseen = [replace(node, is_busy=None) for node in nodes()]
    (held,) = decided(issue(), nodes=unseen, runs_on={"g1": [way("llama")]})
    assert "it needs 1 other idle node, and 0 are known" in held.why_not
    two = {"g1": [way("llama")], "g2": [way("gemma")]}
    found = decided(issue("g1"), issue("g2"), nodes=nodes(busy=everybody[:-1]), runs_on=two, share=0.5)
    assert [each.node_action for each in found] == ["take_out", "none"], "one idle node is not promised twice"


def test_a_run_that_has_nowhere_to_go_stays() -> None:
    (found,) = decided(issue(), runs_on={"g1": [way("llama", "")]})
    assert (found.node_action, found.why_not) == ("none", "llama has no spare")


def test_a_run_left_on_a_node_that_we_took_out_is_moved_again() -> None:
    ours, taken = (
        nodes({"g1": "craton:ab12"}, busy=("g1",)),
        LedgerEntry(NOW - 900, "take_out", "g1", "ab12", action="reset"),
    )
    (found,) = decided(nodes=ours, history=[taken], runs_on={"g1": [way("llama")]})
    assert (found.node_action, found.runs, found.mark, found.issue) == ("move", ("llama",), "ab12", None)
    asked = LedgerEntry(NOW - 60, "move", "g1", "ab12", run="llama")
    assert decided(nodes=ours, history=[taken, asked], runs_on={"g1": [way("llama")]}) == [], "it has just been asked"
    theirs = nodes({"g1": "fan"}, busy=("g1",))
    assert decided(nodes=theirs, history=[taken], runs_on={"g1": [way("llama")]}) == []


def test_an_error_of_programs_counts_against_a_card_that_has_it_under_other_runs() -> None:
    seen = issue(action="observe", evidence="GPU 3: XID 31", device="GPU 3", run="gemma")
    own = [incident(action="observe", what="xid", device="GPU 3", run="gemma")]
    other = [incident(action="observe", what="xid", device="GPU 3", run="llama")]
    elsewhere = [incident(action="observe", what="xid", device="GPU 4", run="llama")]
    assert [each.action for each in decided(seen, history=own)] == ["observe"]
    assert [each.action for each in decided(seen, history=elsewhere)] == ["observe"]
    (found,) = decided(seen, history=other)
    assert (found.action, found.node_action, found.escalated_from) == ("reset", "take_out", "observe")
    assert "in llama too" in found.reason
    again = [incident(action="observe", what="xid", device="GPU 3", run="llama", moment=NOW - 60)]
    (found,) = decided(replace(seen, moment=NOW - 65), history=again)
    assert found.action == "observe", "two runs share the node and saw one error"


# -- handing over -----------------------------------------------------------------------------------------------------


def test_an_empty_node_that_we_took_out_is_handed_over_where_that_is_allowed() -> None:
    ours = {"g1": "craton:ab12"}
    taken = [LedgerEntry(NOW - 900, "take_out", "g1", "ab12", action="reboot", text="XID 79")]
    (kept,) = decided(issue(), nodes=nodes(ours), history=taken)
    (busy,) = decided(issue(), nodes=nodes(ours, busy=("g1",)), history=taken, hands_over=LEAVES)
    (empty,) = decided(issue(), nodes=nodes(ours), history=taken, hands_over=LEAVES)
    (quiet,) = decided(nodes=nodes(ours), history=taken, hands_over=LEAVES)
    assert (kept.node_action, busy.node_action, empty.node_action) == ("none", "none", "hand_over")
    assert "when the node is idle" in busy.why_not
    assert empty.mark == "ab12"
    assert (quiet.node_action, quiet.action, quiet.reason) == ("hand_over", "reboot", "XID 79"), (
        "nobody is there to complain"
    )
    assert decided(nodes=nodes(ours), history=taken) == []
    assert decided(nodes=nodes({"g1": "craton:cd34"}), history=taken, hands_over=LEAVES) == [], "out by another action"


def test_neither_what_was_handed_over_nor_what_others_took_out_is_handed_over() -> None:
    handed = [ServiceNode("g1", True, "Action:Reboot", False, "ab12")]
    (again,) = decided(issue(), nodes=handed, hands_over=LEAVES)
    (theirs,) = decided(issue(), nodes=nodes({"g1": "broken fan"}), hands_over=LEAVES)
    (healers,) = decided(issue(), nodes=nodes({"g1": "craton:cd34"}), hands_over=LEAVES)
    assert (again.node_action, theirs.node_action, healers.node_action) == ("none", "none", "none")


# -- from findings and verdicts ---------------------------------------------------------------------------------------


def finding(what: str, severity: str = "fail", action: str = "", **more: str) -> dict[str, str]:
    return {"layer": "infrastructure", "what": what, "severity": severity, "evidence": "GPU 2: bad", "remedy": "",
            "node": "g1", "action": action, **more}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (finding("xid", action="replace"), "replace"),
        (finding("xid", "note", "restart"), "restart"),
        (finding("xid", "note", "observe"), "observe"),
        (finding("xid", "note"), None),  # of a card that is well again
        (finding("gpu_row_remap", "warn", "reset"), "reset"),
        (finding("gpu_memory", "note", "observe"), None),
        (finding("gpu_count"), "reboot"),
        (finding("compute"), "replace"),
        (finding("gpu_throttle", "warn"), None),
        (finding("answer", layer="orchestration"), "reboot"),
        (finding("torch", layer="ML software"), None),
        (finding("nvme"), None),  # the table does not say that the node is at fault
        (finding("gpu_count", "ok"), None),
        (finding("gpu_count", node=""), None),
    ],
)
def test_what_a_finding_asks_for(given: dict[str, str], expected: str | None) -> None:
    found = of_doctor({"findings": [given]})
    assert [each.action for each in found] == ([expected] if expected else [])
    if found:
        assert (found[0].device, found[0].is_urgent) == ("GPU 2", given["severity"] == "fail")


def test_an_xid_of_a_report_has_the_moment_it_happened() -> None:
    xid = {"bus_id": "0000:53:00", "code": 31, "age_seconds": 600.0}
    other = {"bus_id": "0000:64:00", "code": 31, "age_seconds": 5.0}
    node = {"node": "g1", "report": {"kernel_log": {"xids": [xid, other]}}}
    given = finding("xid", "note", "observe", evidence="GPU 3 (0000:53:00.0): XID 31, GPU memory page fault")
    (found,) = of_doctor({"findings": [given], "nodes": [node]}, NOW)
    assert (found.moment, found.run) == (NOW - 600.0, "")
    (found,) = of_doctor({"findings": [given], "nodes": [{"node": "g1"}]}, NOW)
    assert found.moment == NOW, "an older Craton tells no log"
    (found,) = of_doctor({"findings": [finding("gpu_count")], "nodes": [node]}, NOW)
    assert found.moment == NOW


def test_a_verdict_becomes_trouble_of_the_host_that_its_node_is_on() -> None:
    other = Finding("link_down", (), 0.9, "a link of node-0 is down", node="node-0")
    verdict = Verdict(
        "dead", "device", "node-1", 9, cause="gpu_lost", because="GPU 1 fell off", confidence=0.95, others=(other,)
    )
    found = of_verdict(verdict, {"node-0": "g3", "node-1": "g7"}, "llama")
    assert [(each.node, each.action, each.what, each.confidence, each.run) for each in found] == [
        ("g7", "reboot", "gpu_lost", 0.95, "llama"),
        ("g3", "reboot", "link_down", 0.9, "llama"),
    ]
    assert of_verdict(verdict, {}, "llama") == [], "nobody knows which machine it is"


@pytest.mark.parametrize("cause", ["gpu_out_of_memory", "straggler", "loader_slow", "tcp_fallback", "node_down", ""])
def test_what_is_not_the_nodes_own_fault_is_no_trouble_of_it(cause: str) -> None:
    verdict = Verdict("slow", "framework", "node-1", 9, cause=cause, confidence=0.95)
    assert of_verdict(verdict, {"node-1": "g7"}) == []


def test_the_table_names_causes_that_exist_and_actions_that_exist() -> None:
    table = rules()
    assert set(table.causes) <= set(causes())
    assert {*table.causes.values(), *table.findings.values()} <= set(HEALTH_ACTIONS)
    # A GPU of a member is found in the member's own run, which has the node.
    hardware = {name for name, cause in causes().items() if cause.layer == "device" and name != "member_device"}
    assert hardware <= set(table.causes), "every cause in a card has an action"
