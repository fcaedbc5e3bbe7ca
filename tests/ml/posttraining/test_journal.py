"""The journal: what is read is what was written, and a damaged file costs generations, never samples."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from craton.job import parse_job
from craton.ml.posttraining.asynchronous.groups import ENVIRONMENT, RolloutCopy, RolloutGroup
from craton.ml.posttraining.asynchronous.journal import (
    Continuation,
    JournalEntry,
    JournalError,
    RolloutJournal,
    continue_from,
    from_bytes,
    to_bytes,
)
from craton.ml.posttraining.asynchronous.open import rules_of
from craton.ml.posttraining.asynchronous.selection import Frontier
from craton.ml.verifiers import Verdict


def finished_group(index: int, version: int = 0) -> RolloutGroup:
    verdict = Verdict(0.5, {"exact": 1.0, "judge": None}, "", 0.25)
    lost = Verdict(None, {}, "the verifier took longer than 10s")
    first = RolloutCopy(
        [7, 8, 3, 2], [-0.5, -1.25, 0.0, -0.125], [version, version, ENVIRONMENT, version], "ab\n“é”", verdict=verdict
    )
    first.transcript, first.content, first.prompt = [{"role": "assistant", "content": "ab"}], "the other", [1, 2]
    copies = [first, RolloutCopy([9], [-3.0], [version], is_truncated=True, verdict=lost, seconds=0.5)]
    return RolloutGroup(index, [replace(copy, is_complete=True) for copy in copies], version)


def partial_group(index: int, version: int = 0) -> RolloutGroup:
    return RolloutGroup(index, [RolloutCopy([5, 6], [-1.0, -2.0], [version, version + 1]), RolloutCopy()], version)


def entry_of(step: int) -> JournalEntry:
    """Step N trains indices 2N - 2 and 2N - 1; one finished, one partial and two new groups are pending after it."""
    after = 2 * step
    batch = (finished_group(after - 2, step - 1), finished_group(after - 1, step - 1))
    pending = (
        finished_group(after, step - 1),
        partial_group(after + 1, step - 1),
        RolloutGroup(after + 2),
        RolloutGroup(after + 3),
    )
    return JournalEntry(step, after + 4, batch, (), pending)


def test_an_entry_is_read_as_it_was_written(tmp_path: Path) -> None:
    journal = RolloutJournal(tmp_path / "journal")
    entry = JournalEntry(
        3, 20, (finished_group(4),), (5, 6), (partial_group(7), RolloutGroup(8, begun=2), RolloutGroup(9))
    )
    journal.write(entry)
    assert journal.read(3) == entry
    assert journal.read(4) is None
    assert journal.steps() == [3]
    assert sorted(os.listdir(journal.folder)) == ["step-3"]


GENERATIONS = st.lists(
    st.tuples(st.integers(0, 2**31 - 1), st.floats(-100, 0, width=32), st.integers(0, 2**31 - 1)), max_size=5
)


@given(st.lists(st.lists(GENERATIONS, max_size=3), max_size=4), st.integers(0, 10**12))
def test_any_numbers_come_back(groups: list[list[list[tuple[int, float, int]]]], step: int) -> None:
    pending = tuple(
        RolloutGroup(
            index, [RolloutCopy(*map(list, zip(*copy, strict=True))) if copy else RolloutCopy() for copy in copies]
        )
        for index, copies in enumerate(groups)
    )
    entry = JournalEntry(step, len(groups), (), (), pending)
    assert from_bytes(to_bytes(entry)) == entry


@given(st.data())
def test_no_damaged_file_is_taken_for_an_entry(data: st.DataObject) -> None:
    written = to_bytes(entry_of(2))
    position = data.draw(st.integers(0, len(written) - 1))
    damaged = bytearray(written)
    if data.draw(st.booleans()):
        damaged[position] ^= data.draw(st.integers(1, 255))
    else:
        del damaged[position:]
    with pytest.raises(JournalError):
        from_bytes(bytes(damaged))


def test_a_file_of_another_step_is_refused(tmp_path: Path) -> None:
    journal = RolloutJournal(tmp_path)
    journal.write(entry_of(2)).rename(journal.path(3))
    with pytest.raises(JournalError, match="it is the entry of step 2"):
        journal.read(3)


def settled(continuation: Continuation) -> list[int]:
    return [index for entry in continuation.repeated for index in entry.settled]


SAVED = Frontier(6, (2, 3, 4, 5))  # what the checkpoint of step 1 has in its counters


@pytest.mark.parametrize(
    ("damaged", "repeats", "pending"),
    [
        ((), [2, 3, 4], [8, 9, 10, 11]),
        ((4,), [2, 3], [6, 7, 8, 9]),
        ((3,), [2], [4, 5, 6, 7]),
        ((2,), [], [2, 3, 4, 5]),
        ((1,), [2, 3, 4], [8, 9, 10, 11]),
        ((1, 2), [], []),
    ],
)
def test_a_run_goes_on_after_the_last_entry_that_follows(
    tmp_path: Path, damaged: tuple[int, ...], repeats: list[int], pending: list[int]
) -> None:
    journal = RolloutJournal(tmp_path)
    for step in range(1, 5):
        journal.write(entry_of(step))
    for step in damaged:
        data = bytearray(journal.path(step).read_bytes())
        data[len(data) // 2] ^= 1
        journal.path(step).write_bytes(data)
    found = continue_from(journal, 1, SAVED)
    assert [entry.step for entry in found.repeated] == repeats
    assert [group.index for group in found.pending] == pending
    assert len(found.problems) == len(damaged)
    assert all("its checksum is wrong" in problem for problem in found.problems)
    assert max(journal.steps()) == 1 + len(repeats), "entries of steps that will be trained otherwise are gone"
    assert SAVED.can_become(found.frontier_after, settled(found)), "none is lost, none is trained twice"


def test_an_entry_that_does_not_follow_is_not_repeated(tmp_path: Path) -> None:
    journal = RolloutJournal(tmp_path)
    journal.write(entry_of(1))
    journal.write(JournalEntry(2, 8, (finished_group(0), finished_group(3)), (), (RolloutGroup(6), RolloutGroup(7))))
    found = continue_from(journal, 1, SAVED)
    assert found.repeated == ()
    assert found.frontier_after == SAVED
    assert "does not continue the entry before it" in found.problems[0]


def test_without_a_journal_all_that_was_pending_is_generated_again(tmp_path: Path) -> None:
    found = continue_from(RolloutJournal(tmp_path / "none"), 7, Frontier(30, (27, 29)))
    assert found == Continuation((), Frontier(30, (27, 29)), ())


def marked(entry: JournalEntry, rules: str = "now") -> JournalEntry:
    """Return an entry whose groups have the fingerprints of their prompts, `prompt N`."""
    batch, pending = (
        tuple(replace(group, fingerprint=f"prompt {group.index}") if group.copies else group for group in groups)
        for groups in (entry.batch, entry.pending)
    )
    return replace(entry, batch=batch, pending=pending, rules=rules)


@pytest.mark.parametrize(
    ("changed", "repeats", "pending", "count"),
    [
        ((), [2, 3, 4], [8, 9, 10, 11], 0),
        ((100,), [2, 3, 4], [8, 9, 10, 11], 0),
        ((9,), [2, 3, 4], [8, 10, 11], 1),
        ((5,), [2], [4, 6, 7], 1),
        ((3, 8, 9), [], [2, 4, 5], 3),
        (range(100), [], [4, 5], 8),
    ],
)
def test_samples_of_other_prompts_are_generated_again(
    tmp_path: Path, changed: tuple[int, ...], repeats: list[int], pending: list[int], count: int
) -> None:
    journal = RolloutJournal(tmp_path, "now")
    for step in range(1, 5):
        journal.write(marked(entry_of(step)))
    found = continue_from(journal, 1, SAVED, lambda index: "another" if index in changed else f"prompt {index}")
    assert [entry.step for entry in found.repeated] == repeats
    assert [group.index for group in found.pending] == pending
    assert found.problems == ()
    assert max(journal.steps()) == 1 + len(repeats)
    assert SAVED.can_become(found.frontier_after, settled(found)), "none is lost, none is trained twice"
    if not count:
        assert found.outdated == ()
    else:
        noun = "1 prompt index" if count == 1 else f"{count} prompt indices"
        (reason,) = found.outdated
        assert f"samples of {noun} in the journal had another prompt or row" in reason


def test_samples_under_other_rules_are_generated_again(tmp_path: Path) -> None:
    """Entries 1 and 2 are of the job as it was, and the run goes back to the checkpoint of step 1."""
    journal = RolloutJournal(tmp_path, "now")
    for step in range(1, 3):
        journal.write(marked(entry_of(step), "before"))
    found = continue_from(journal, 1, SAVED, lambda index: f"prompt {index}")
    assert found.repeated == ()
    assert [group.index for group in found.pending] == [4, 5], "those that have not begun"
    assert journal.steps() == [1]
    assert "samples of 4 prompt indices in the journal had another reward" in found.outdated[0]
    journal.write(marked(entry_of(2)))
    again = continue_from(journal, 1, SAVED, lambda index: f"prompt {index}")
    assert [entry.step for entry in again.repeated] == [2]
    assert again.outdated == (), "what was generated since is of the job as it is"


def test_the_age_of_a_group_is_that_of_its_oldest_token() -> None:
    assert RolloutGroup(0).oldest is None
    assert RolloutGroup(0, [RolloutCopy(), RolloutCopy()], begun=4).oldest == 4
    assert partial_group(0, version=3).oldest == 3, "its second copy may get tokens of the version of its submission"
    both = RolloutGroup(0, [RolloutCopy([1], [-1.0], [6]), RolloutCopy([1, 2], [-1.0, -1.0], [5, 7])], begun=4)
    assert both.oldest == 5
    assert not both.is_finished
    assert finished_group(0).is_finished


def test_the_rules_of_a_job_are_its_rewards_and_its_sampling() -> None:
    def rules(reward: str = "{verifier: exact}", rollout: str = "group: 2", steps: int = 2) -> str:
        return rules_of(
            parse_job(f"""
            name: sums
            kind: grpo
            model: {{layers: 2, hidden: 32, ffn_hidden: 64, heads: 4, kv_heads: 2, vocab: 259}}
            data: {{source: "some:prompts", tokenizer: "bpe:259", sequence: 16}}
            train: {{steps: {steps}, precision: fp32, initialize: random}}
            rollout: {{prompts: 4, mode: overlap, {rollout}}}
            reward: {reward}
            cluster: local
            """)
        )

    judges = [f"{{verifier: judge, endpoint: {{url: 'http://{host}:8000'}}}}" for host in ("here", "there")]
    assert rules() == rules(steps=9) == rules(rollout="group: 2, staleness: 3")
    others = [
        rules(reward="{verifier: math}"),
        rules(reward="{verifier: exact, weight: 2}"),
        rules(rollout="group: 4"),
        rules(rollout="group: 2, temperature: 0.5"),
        rules(judges[0]),
    ]
    assert len({rules(), *others}) == 6
    assert rules(judges[0]) == rules(judges[1]), "a judge that moved judges alike"
