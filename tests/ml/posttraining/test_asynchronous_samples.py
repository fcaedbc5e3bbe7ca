"""Samples that are generated beside training: none too old, none lost, none twice, over crashes at every step."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
from rollout_models import VOCABULARY, trained_model, update
from waiting import wait_until

from craton.job.sections.posttraining import Rollout
from craton.ml.data import Prompt
from craton.ml.models import Decoder
from craton.ml.posttraining.asynchronous.completing import CompletionSettings
from craton.ml.posttraining.asynchronous.engine_backend import EngineBackend
from craton.ml.posttraining.asynchronous.journal import RolloutJournal
from craton.ml.posttraining.asynchronous.samples import AsynchronousSamples
from craton.ml.posttraining.asynchronous.selection import Frontier
from craton.ml.posttraining.samples import StepSamples
from craton.ml.posttraining.shared import RolloutEngine
from craton.ml.posttraining.synchronous import EqualRewardsError
from craton.ml.posttraining.verdicts import Rewards
from craton.ml.serving import EngineSettings
from craton.ml.training import AdamW
from craton.ml.training.parallel import Ranks
from craton.ml.verifiers import Verdict, VerifierSample
from craton.telemetry.rank import LedgerClock

STEPS, PROMPTS, GROUP, STALENESS, MAX_TOKENS = 6, 3, 2, 2, 5
ROLLOUT = Rollout(prompts=PROMPTS, group=GROUP, mode="overlap", staleness=STALENESS)


class Prompts:
    def prompt(self, index: int) -> Prompt:
        tokens = tuple((index * 5 + place) % VOCABULARY for place in range(2 + index % 3))
        return Prompt(index, tokens, {"prompt": str(index)})


class OtherPrompts:
    """The same, but every prompt has another row or, if its index is even, other tokens."""

    def prompt(self, index: int) -> Prompt:
        found = Prompts().prompt(index)
        other = tuple(reversed(found.tokens)) if index % 2 == 0 else found.tokens
        return Prompt(index, other, {**found.row, "answer": "new"})


class Letters:
    def text(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))


class FirstToken:
    """The reward is the first token of a completion; of every third prompt it is 1."""

    def submit(self, sample: VerifierSample) -> Future[Verdict]:
        future: Future[Verdict] = Future()
        is_equal = int(str(sample.prompt)) % 3 == 0
        future.set_result(Verdict(1.0 if is_equal else float((sample.completion.split() or ["0"])[0])))
        return future


class Course:
    """A run in this process: it draws steps, trains a little, and may resume at any step."""

    def __init__(self, folder: Path, model: tuple[Decoder, AdamW, Ranks], rollout: Rollout = ROLLOUT) -> None:
        self.model, self.optimizer, ranks = model
        engine = RolloutEngine(self.model, ranks, EngineSettings(page=4, max_length=16), shares=False)
        self.clock, self.notes = LedgerClock(), list[tuple[str, str]]()
        self.journal = RolloutJournal(folder / "journal")
        self.samples = AsynchronousSamples(
            EngineBackend(engine, max_running=4),
            CompletionSettings(GROUP, MAX_TOKENS, stop_tokens=(1, 2, 3)),
            Prompts(),
            Letters(),  # type: ignore[arg-type]
            FirstToken(),  # type: ignore[arg-type]
            Rewards(None, ranks),
            rollout,
            STEPS,
            self.journal,
            ranks,
            self.clock,
            lambda name, reason: self.notes.append((name, reason)),
        )
        self.counters: dict[int, Frontier] = {0: Frontier()}  # of the checkpoint of every step

    def train(self, first: int, last: int, before: Callable[[int], None] = lambda _: None) -> list[StepSamples]:
        """Resume at the checkpoint before step `first`, and train to step `last`; call `before` each step."""
        self.samples.close()
        saved = self.counters[first - 1]
        self.samples.pending, following = saved.pending, saved.next_index
        drawn = []
        for step in range(first, last + 1):
            before(step)
            self.clock.begin_step(step)
            drawn.append(self.samples.draw(following, lambda: None))
            following = drawn[-1].next_prompt
            update(self.model, self.optimizer, step)
            self.counters[step] = Frontier(following, tuple(self.samples.pending))
        return drawn


@pytest.fixture(scope="module")
def model() -> tuple[Decoder, AdamW, Ranks]:
    return trained_model("llama")


@pytest.fixture
def course(tmp_path: Path, model: tuple[Decoder, AdamW, Ranks]) -> Iterator[Course]:
    made = Course(tmp_path, model)
    yield made
    made.samples.close()


def indices(step: StepSamples) -> list[int]:
    return [sample.prompt.index for sample in step.samples[::GROUP]]


def tokens(step: StepSamples) -> list[list[int]]:
    return [sample.tokens for sample in step.samples]


def check_course(journal: RolloutJournal, last: int = STEPS) -> list[int]:
    """Check all entries of a journal: each follows the one before, and no token is too old; return what was trained."""
    before, trained = Frontier(), []
    for step in range(1, last + 1):
        entry = journal.read(step)
        assert entry is not None, step
        assert before.can_become(entry.frontier, entry.settled), "an index is lost, or trained twice"
        ages = [step - 1 - version for group in entry.batch for copy in group.copies for version in copy.versions]
        assert 0 <= min(ages) <= max(ages) <= STALENESS
        trained += [group.index for group in entry.batch]
        before = entry.frontier
    assert len(trained) == len(set(trained)) == PROMPTS * last
    return trained


def test_every_prompt_is_trained_once_within_the_bound(course: Course) -> None:
    steps = course.train(1, STEPS)
    assert check_course(course.journal) == [index for step in steps for index in indices(step)]
    assert sorted(check_course(course.journal)) == list(range(STEPS * PROMPTS)), "nothing is generated for no step"
    assert course.samples.pending == ()
    for number, step in enumerate(steps, 1):
        assert [sample.copy for sample in step.samples] == list(range(GROUP)) * PROMPTS
        assert step.metrics["max_staleness"] <= step.metrics["staleness_bound"] == STALENESS
        assert 0 <= step.metrics["staleness"] <= step.metrics["max_staleness"]
        found = {"rollout_idle_share", "rollout_tokens_per_second"} & set(step.metrics)
        assert len(found) == 2 or (number == STEPS and not found), "the last step may have nothing left to generate"
        assert step.phase_seconds.keys() == {"sync", "rollout", "reward"}, number
    assert steps[-1].metrics["staleness"] > 0, "samples of the last step were generated beside earlier ones"


def test_rollouts_with_nothing_left_to_generate_are_not_idle(course: Course) -> None:
    """Before the last two steps all their samples are generated, so the last one has no throughput."""

    def wait(step: int) -> None:
        if step == STEPS - 1:
            producer = course.samples._producer
            assert producer is not None
            wait_until(lambda: len(producer.finished(lambda: None)) == 2 * PROMPTS)

    *_, before, last = course.train(1, STEPS, wait)
    assert before.metrics.keys() >= {"rollout_tokens_per_second", "rollout_idle_share"}
    assert not {"rollout_tokens_per_second", "rollout_idle_share"} & set(last.metrics)
    assert last.metrics["staleness"] > 0


@pytest.mark.parametrize("lost", [2, STEPS])
def test_a_crash_at_any_step_repeats_the_same_batches(course: Course, lost: int) -> None:
    """The run trains up to a step, then resumes at every checkpoint before it."""
    steps = course.train(1, lost)
    for first in range(1, lost + 1):
        again = course.train(first, lost)
        assert [tokens(step) for step in again] == [tokens(step) for step in steps[first - 1 :]]
        assert all("rollout_tokens_per_second" not in step.metrics for step in again[:-1]), "none is generated"
        check_course(course.journal, lost)
    course.train(lost + 1, STEPS)
    check_course(course.journal)
    assert not course.notes


@pytest.mark.parametrize("damaged", [2, 4])
def test_a_damaged_entry_costs_generations_and_no_sample(course: Course, damaged: int) -> None:
    course.train(1, 4)
    path = course.journal.path(damaged)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    course.train(3, STEPS)
    assert [name for name, _ in course.notes] == ["journal_damaged"]
    assert "its checksum is wrong" in course.notes[0][1]
    if damaged == 4:
        check_course(course.journal)
    entries = [course.journal.read(step) for step in range(3, STEPS + 1)]
    settled = [index for entry in entries if entry is not None for index in entry.settled]
    assert course.counters[2].can_become(course.counters[STEPS], settled)


@pytest.mark.parametrize("what", ["prompts", "rules"])
def test_no_sample_of_another_job_is_trained(course: Course, what: str) -> None:
    """The run dies in step 4, its job is changed, and it resumes at the checkpoint of step 2."""
    course.train(1, 4)
    course.samples._prompts = OtherPrompts() if what == "prompts" else Prompts()
    course.journal.rules = "" if what == "prompts" else "another reward"
    again = course.train(3, STEPS)
    check_course(course.journal)
    ((name, reason),) = course.notes
    assert name == "journal_outdated"
    assert ("another prompt or row" if what == "prompts" else "another reward") in reason
    versions = [version for step in again for sample in step.samples for version in sample.versions]
    assert min(versions) == 2, "all were generated after the change"
    course.notes.clear()
    assert [tokens(step) for step in course.train(5, STEPS)] == [tokens(step) for step in again[2:]]
    assert not course.notes, "what was generated since is not outdated"


def test_unfinished_generations_go_on_where_they_were(course: Course) -> None:
    """Of what was pending at a checkpoint, finished groups are trained as they were."""
    course.train(1, 3)
    entry = course.journal.read(3)
    assert entry is not None
    course.journal.remove([4])
    kept = {group.index: group for group in entry.pending if group.is_finished}
    course.train(4, STEPS)
    for step in range(4, STEPS + 1):
        later = course.journal.read(step)
        assert later is not None
        for group in later.batch:
            assert group.index not in kept or group == kept[group.index]


def test_a_full_disk_costs_generations_and_no_sample(course: Course, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("craton.ml.posttraining.asynchronous.journal.replace_bytes", refuse)
    course.train(1, 2)
    assert {name for name, _ in course.notes} == {"journal_failed"}
    again = course.train(2, STEPS)
    trained = [index for step in again for index in indices(step)]
    assert course.counters[1].can_become(course.counters[STEPS], trained)


def test_groups_of_equal_rewards_are_replaced(tmp_path: Path, model: tuple[Decoder, AdamW, Ranks]) -> None:
    course = Course(tmp_path, model, ROLLOUT.model_copy(update={"filter": "equal"}))
    steps = course.train(1, STEPS)
    trained = check_course(course.journal)
    assert all(index % 3 for index in trained)
    assert all(len(set(row)) > 1 for step in steps for row in step.rewards.tolist())
    filtered = [index for step in course.journal.steps() for index in course.journal.read(step).filtered]  # type: ignore[union-attr]
    assert sorted([*trained, *filtered]) == list(range(len(trained) + len(filtered)))
    course.samples.close()
    with pytest.raises(EqualRewardsError, match="neither too easy nor too hard"):
        course.samples._check_filtered(20 * PROMPTS)


def test_an_evaluation_does_not_disturb_what_is_generated(course: Course) -> None:
    course.train(1, 2)
    found = [course.samples.complete(Prompts(), range(5), 7, 2, lambda: None) for _ in range(2)]
    assert [sample.prompt.index for sample in found[0]] == list(range(5))
    assert [sample.tokens for sample in found[0]] == [sample.tokens for sample in found[1]]
    assert all(set(sample.versions) == {2} and sample.verdict is not None for sample in found[0])
    course.clock.begin_step(3)
    course.samples.draw(course.counters[2].next_index, lambda: None)
    check_course(course.journal, 3)
