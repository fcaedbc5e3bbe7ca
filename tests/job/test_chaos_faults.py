"""Faults are one line each; every wrong one is told with what is allowed, and random ones are the same every time."""

from __future__ import annotations

import pytest

from craton.job import FaultError, InjectedFault, JobError, check_fault, dump_job, parse_fault, parse_job, random_faults
from craton.job.faults import FAULT_KINDS

JOB = "kind: command\ncommand: train\ncluster: local x 2\n"
NODES = ["node-0", "node-1"]

UNDERSTOOD: dict[str, dict[str, object]] = {
    "kill rank=3@step=40": {"kind": "kill", "target": "rank", "rank": 3, "step": 40},
    "kill rank=0": {"target": "rank", "rank": 0, "step": None, "during": None},
    "kill rank=3@during=restore": {"rank": 3, "during": "restore", "step": None},
    "kill rank=3@step=7,during=saving": {"rank": 3, "during": "saving", "step": 7},
    "kill agent=node-1@step=40": {"target": "agent", "node": "node-1", "step": 40},
    "kill keeper=node-1@step=40": {"target": "keeper", "node": "node-1"},
    "kill coordinator@step=40": {"target": "coordinator", "node": None, "step": 40},
    "hang rank=3@step=40": {"kind": "hang", "how": "stop"},
    "hang rank=3@step=40,how=spin": {"how": "spin", "step": 40},
    "fail rank=2@step=9": {"kind": "fail", "rank": 2, "step": 9},
    "corrupt tier=peer,rank=1,whose=copies@step=50": {"tier": "peer", "rank": 1, "how": "copies", "target": "tier"},
    "corrupt tier=peer": {"tier": "peer", "rank": None, "how": "all"},
    "corrupt tier=shared@step=50": {"tier": "shared", "how": None, "step": 50},
    "slow-disk tier=shared,seconds=0.5,for=20s@step=10": {"seconds": 0.5, "for_seconds": 20.0, "step": 10},
    "slow-disk tier=/fsx/x,seconds=2": {"tier": "/fsx/x", "seconds": 2.0, "for_seconds": None},
    "lose-node node-1@step=40": {"kind": "lose-node", "target": "node", "node": "node-1", "step": 40},
    "lose-node  node=node-1 @ step=40": {"node": "node-1", "step": 40},
    "kill rank=0@during=transfer,step=4": {"rank": 0, "during": "transfer", "part": "weights"},
    "kill verifier=1@during=reward,step=4": {"target": "verifier", "rank": 1, "during": "reward", "part": "verifier"},
    "corrupt journal@step=4": {"target": "journal", "how": "flip", "part": "journal"},
    "corrupt journal,how=cut": {"target": "journal", "how": "cut", "step": None},
    "corrupt weights@step=4": {"target": "weights", "how": None, "part": "weights"},
    "kill member=rollout-0@step=4": {"target": "member", "member": "rollout-0", "step": 4},
    "kill rank=1,member=base": {"target": "rank", "member": "base", "rank": 1},
    "corrupt tier=shared,member=base": {"target": "tier", "member": "base"},
    "lose-node node-1,member=base@step=4": {"target": "node", "member": "base", "node": "node-1"},
}


@pytest.mark.parametrize("text", UNDERSTOOD)
def test_what_is_written_is_what_happens(text: str) -> None:
    fault = parse_fault(text)
    assert {key: getattr(fault, key) for key in UNDERSTOOD[text]} == UNDERSTOOD[text]
    assert parse_fault(fault.text) == fault


REFUSED = {
    "kil rank=3": ["'kil' is not a fault kind", "kill, hang, fail", "did you mean 'kill'"],
    "": ["is not a fault kind"],
    "kill": ["write e.g. kill rank=3@step=40"],
    "kill rank": ["'rank' has no value", "rank=3@step=40"],
    "kill rank=": ["rank has no value"],
    "kill rnak=3": ["did you mean 'rank'"],
    "kill rank=three": ["rank is 'three', not a whole number from 0"],
    "kill rank=1@step=0": ["step is '0', not a whole number from 1"],
    "kill rank=1@step=3@step=4": ["is not a valid fault"],
    "kill rank=1,rank=2": ["gives rank twice"],
    "kill rank=1,agent=node-1": ["names rank and agent"],
    "kill rank=1@": ["is not a valid fault"],
    "kill @step=3": ["is not a valid fault"],
    "kill step=3": ["names nothing to kill", "rank, agent, keeper, coordinator"],
    "kill rank=1@during=restor": ["did you mean 'restore'", "regroup"],
    "hang rank=1@step=3,how=stopp": ["stop, spin", "did you mean 'stop'"],
    "hang agent=node-1": ["'agent' is not known here"],
    "hang member=base": ["names nothing to hang"],
    "kill member=": ["member has no value"],
    "kill rank=1,member=": ["member has no value"],
    "kill member=a,member=b": ["gives member twice"],
    "corrupt tier=pear": ["did you mean 'peer'", "an absolute path"],
    "corrupt tier=shared,whose=own": ["apply only to tier=peer"],
    "corrupt journal,how=torn": ["how is 'torn'", "flip, cut"],
    "corrupt weights,how=cut": ["how applies only to the journal"],
    "corrupt journal,weights": ["'weights' has no value"],
    "kill verifier": ["'verifier' has no value"],
    "kill verifier=one": ["verifier is 'one', not a whole number from 0"],
    "corrupt tier=peer@during=saving": ["'during' is not known here"],
    "corrupt tier=s3://bucket/x": ["objects in S3"],
    "slow-disk tier=object,seconds=1": ["objects in S3"],
    "slow-disk tier=shared": ["lacks seconds=, the delay per write"],
    "slow-disk tier=peer,seconds=1": ["peer is not on a disk"],
    "slow-disk tier=shared,seconds=fast": ["seconds: 'fast' is not a duration"],
    "lose-node": ["lose-node node-1@step=40"],
    "lose-node node-1,node-2": ["'node-2' has no value"],
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_read_is_told_with_what_is_allowed(text: str) -> None:
    with pytest.raises(FaultError) as caught:
        parse_fault(text)
    for words in REFUSED[text]:
        assert words in str(caught.value)


def check(text: str, **changes: object) -> None:
    run: dict[str, object] = {"world": 4, "nodes": NODES, "tiers": ["peer", "shared"], "step": 10, "steps": 100}
    check_fault(parse_fault(text), **{**run, **changes})  # type: ignore[arg-type]


def test_what_cannot_happen_in_a_run_is_told() -> None:
    for fine in ("kill rank=3@step=11", "lose-node node-1@step=100", "corrupt tier=peer", "kill rank=0@during=restore"):
        check(fine)
    check("kill rank=0@step=1", step=0)
    refused = {
        "kill rank=4@step=11": "the ranks are 0 to 3",
        "lose-node node-7": "the nodes are node-0, node-1",
        "corrupt tier=nvme": "it has peer, shared",
        "kill rank=0@step=10": "step 10 is past",
        "kill rank=0@step=101": "ends after step 100",
    }
    for text, words in refused.items():
        with pytest.raises(FaultError, match=words):
            check(text)


def test_parts_of_post_training_are_broken_only_where_they_are() -> None:
    for text, part in {
        "kill verifier=0": "verifier",
        "corrupt journal": "journal",
        "corrupt weights": "weights",
        "kill rank=0@during=transfer": "weights",
    }.items():
        check(text, parts=[part])
        with pytest.raises(FaultError, match="this run has no"):
            check(text)
    check("kill rank=0@during=transfer", trains=False, parts=["weights"])
    modes = {"sync": {"verifier"}, "overlap": {"verifier", "journal"}, "separate": {"verifier", "journal", "weights"}}
    for mode, parts in modes.items():
        job = parse_job(
            "kind: grpo\nmodel: llama-3.1-8b\ndata: {path: x.jsonl}\nreward: {verifier: exact}\n"
            f"rollout: {{mode: {mode}}}\ntrain: {{steps: 3}}\ncluster: local\n"
        )
        assert job.fault_parts == parts


def test_a_command_can_only_lose_what_it_has() -> None:
    for fine in ("kill rank=1@step=12", "hang rank=1", "kill agent=node-1", "lose-node node-1", "kill coordinator"):
        check(fine, trains=False)
    for text in ("fail rank=1", "corrupt tier=peer", "kill rank=1@during=restore", "kill keeper=node-1"):
        with pytest.raises(FaultError, match="this run is a command"):
            check(text, trains=False)


def drawn(count: int = 60, seed: int = 7, **changes: object) -> list[InjectedFault]:
    run: dict[str, object] = {"steps": 600, "world": 4, "nodes": NODES, "tiers": ["peer", "shared"]}
    return random_faults(count, seed, **{**run, **changes})  # type: ignore[arg-type]


def test_random_faults_depend_on_the_seed_alone_and_are_spread() -> None:
    faults = drawn()
    assert faults == drawn()
    assert faults != drawn(seed=8)
    steps = [fault.step or 0 for fault in faults]
    assert all(10 * index < step <= 10 * (index + 1) for index, step in enumerate(steps)), "one in each part"
    assert {fault.kind for fault in faults} == {"kill", "hang", "fail", "corrupt", "slow-disk"}
    assert {fault.target for fault in drawn(300, steps=3000)} == {"rank", "agent", "keeper", "coordinator", "tier"}
    for fault in faults:
        check(fault.text, step=0, steps=600)


def test_a_fault_inside_a_recovery_is_followed_by_one_that_causes_it() -> None:
    faults = drawn(400, steps=4000, kinds=["kill"])
    nested = [index for index, fault in enumerate(faults) if fault.during in ("regroup", "restore")]
    assert len(nested) > 10
    for index in nested:
        after = faults[index + 1]
        assert (after.kind, after.target, after.during) == ("kill", "rank", None)


def test_random_faults_are_only_those_that_can_happen() -> None:
    assert {fault.kind for fault in drawn(tiers=[])} == {"kill", "hang", "fail"}
    assert {fault.kind for fault in drawn(kinds=["hang"])} == {"hang"}
    assert {fault.node for fault in drawn(kinds=["lose-node"])} == set(NODES)
    assert {fault.tier for fault in drawn(tiers=["s3://bucket", "shared"], kinds=["corrupt"])} == {"shared"}
    assert drawn(0) == []
    assert min(fault.step or 0 for fault in drawn(3, first=500)) >= 500
    with pytest.raises(FaultError, match="601 faults do not fit"):
        drawn(601)
    with pytest.raises(FaultError, match="none of corrupt can happen here"):
        drawn(tiers=[], kinds=["corrupt"])
    with pytest.raises(FaultError, match="did you mean 'kill'"):
        drawn(kinds=["kil"])


@pytest.mark.parametrize(
    ("tiers", "expected"),
    [
        (["peer"], {"staging"}),
        (["shared"], {"checkpoint", "saving"}),
        (["peer", "nvme"], {"staging", "checkpoint", "saving"}),
        (["s3://bucket"], set()),
    ],
)
def test_a_rank_is_killed_only_in_what_happens_in_the_run(tiers: list[str], expected: set[str]) -> None:
    drawn_in = {fault.during for fault in drawn(600, steps=6000, tiers=tiers, kinds=["kill"])}
    assert drawn_in - {None, "productive", "regroup", "restore"} == expected


def test_a_job_may_be_told_how_to_recover() -> None:
    job = parse_job(JOB)
    assert (job.recover.tries, job.recover.spare_wait, job.recover.give_up, job.spares) == (3, 30.0, 600.0, 0)
    told = parse_job(JOB + "recover: {tries: 0, spare_wait: 0, give_up: 1h, spares: 2}\n")
    assert (told.recover.tries, told.recover.spare_wait, told.recover.give_up, told.spares) == (0, 0.0, 3600.0, 2)
    assert parse_job(dump_job(told)) == told


def test_the_spares_of_a_cluster_file_are_the_default() -> None:
    place = "cluster: {name: lab, instance: p5.48xlarge, nodes: 4, spares: 1}\n"
    text = JOB.replace("cluster: local x 2\n", place)
    assert parse_job(text).spares == 1
    assert parse_job(text + "recover: {spares: 0}\n").spares == 0


@pytest.mark.parametrize(
    "written",
    [
        "chaos: [kill rank=1@step=3, lose-node node-1@step=9]",
        "chaos: hang rank=0@step=2",
        "chaos: {random: 10, seed: 7, kinds: [kill, hang]}",
    ],
)
def test_chaos_of_a_job_file_is_kept(written: str) -> None:
    job = parse_job(JOB + written)
    assert job.chaos
    assert parse_job(dump_job(job)) == job


WRONG = {
    "chaos:\n  - kill rank=1\n  - kil rank=3": ["job.yaml:6", "did you mean 'kill'"],
    "chaos: {random: 3, sed: 4}": ["job.yaml:4", "did you mean 'seed'"],
    "chaos: {random: 3, kinds: [kil]}": ["chaos.kinds", *FAULT_KINDS],
    "chaos: {seed: 3}": ["'random' is missing under chaos"],
    "chaos: 3": ["not a list of faults"],
    "recover: {tires: 3}": ["did you mean 'tries'"],
    "recover: {spare_wait: soon}": ["recover.spare_wait", "a duration"],
    "recover: {tries: -1}": ["a whole number from 0"],
}


@pytest.mark.parametrize("written", WRONG)
def test_a_mistake_in_the_job_file_has_its_line(written: str) -> None:
    with pytest.raises(JobError) as caught:
        parse_job(JOB + written)
    for words in WRONG[written]:
        assert words in str(caught.value)
