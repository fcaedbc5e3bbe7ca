"""Which groups form a batch: for every sequence of events no sample is too old, none is lost, none is trained twice."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from craton.ml.posttraining.asynchronous.selection import Frontier, GroupState, capacity_of, choose_batch, overdue


@dataclass
class Model:
    """A run in which groups begin and finish in any order, and every step is journalled."""

    prompts: int
    staleness: int
    steps: int
    version: int = 0
    frontier: Frontier = field(default_factory=Frontier)
    oldest: dict[int, int] = field(default_factory=dict)  # of groups that have begun
    finished: set[int] = field(default_factory=set)
    trained: list[tuple[int, int, int]] = field(default_factory=list)  # index, version of training, oldest version
    filtered: list[int] = field(default_factory=list)

    def open(self) -> None:
        self.frontier = self.frontier.filled(capacity_of(self.version, self.prompts, self.staleness, self.steps))

    @property
    def states(self) -> list[GroupState]:
        return [GroupState(index, self.oldest.get(index), index in self.finished) for index in self.frontier.pending]

    def begin(self, choice: int) -> None:
        waiting = [index for index in self.frontier.pending if index not in self.oldest]
        if waiting:
            self.oldest[waiting[choice % len(waiting)]] = self.version

    def finish(self, choice: int) -> None:
        running = [index for index in self.frontier.pending if index in self.oldest and index not in self.finished]
        if running:
            self.finished.add(running[choice % len(running)])

    def filter(self, choice: int) -> None:
        done = [index for index in self.frontier.pending if index in self.finished]
        if done and len(self.filtered) < 5:
            index = done[choice % len(done)]
            self.frontier = self.frontier.without([index])
            self.filtered.append(index)
            self.open()

    def train(self) -> bool:
        """Train a batch if there is one."""
        if self.version == self.steps:
            return False
        batch = choose_batch(self.states, self.version, self.prompts, self.staleness)
        if batch is None:
            return False
        assert len(batch) == self.prompts
        self.trained += [(index, self.version, self.oldest[index]) for index in batch]
        self.frontier = self.frontier.without(batch)
        self.version += 1
        self.open()
        return True

    def end(self) -> None:
        """Let every group finish, in the order of their indices, and train to the last step."""
        while self.version < self.steps:
            if not self.train():
                before = len(self.finished), len(self.oldest)
                self.begin(0)
                self.finish(0)
                assert (len(self.finished), len(self.oldest)) != before, "all groups are finished, and no batch is"

    def check(self) -> None:
        for _, version, oldest in self.trained:
            assert version - oldest <= self.staleness
        settled = [index for index, _, _ in self.trained] + self.filtered
        assert len(settled) == len(set(settled)), "trained twice"
        assert sorted([*settled, *self.frontier.pending]) == list(range(self.frontier.next_index)), "lost"


EVENTS = st.lists(st.tuples(st.sampled_from(["begin", "finish", "finish", "filter", "train"]), st.integers(0, 50)))


def play(model: Model, events: list[tuple[str, int]]) -> None:
    for name, choice in events:
        if name == "train":
            model.train()
        else:
            getattr(model, name)(choice)
        model.check()


@given(st.integers(1, 4), st.integers(1, 4), EVENTS)
def test_every_sequence_of_events_keeps_the_bound_and_trains_each_index_once(
    prompts: int, staleness: int, events: list[tuple[str, int]]
) -> None:
    model = Model(prompts, staleness, steps=8)
    model.open()
    play(model, events)
    model.end()
    model.check()
    assert not model.frontier.pending, "nothing is generated for steps after the last"
    assert len(model.trained) == 8 * prompts


@given(st.integers(1, 3), st.integers(1, 3), EVENTS, EVENTS, st.integers(0, 8))
def test_a_run_that_goes_back_to_any_step_trains_each_index_once(
    prompts: int, staleness: int, events: list[tuple[str, int]], later: list[tuple[str, int]], back: int
) -> None:
    """A crash after any step, a restore of any earlier one: what was pending at it is known; its generations may be
    lost, as with a damaged journal, and are then generated again."""
    model = Model(prompts, staleness, steps=8)
    model.open()
    saved = {0: (model.frontier, {}, set(), [], [])}
    for event in events:
        version = model.version
        play(model, [event])
        if model.version > version:
            kept = dict(model.oldest), set(model.finished), list(model.trained), list(model.filtered)
            saved[model.version] = (model.frontier, *kept)
    step = min(back, max(saved))
    frontier, oldest, finished, trained, filtered = saved[step]
    for is_damaged in (False, True):
        again = Model(prompts, staleness, 8, step, frontier, trained=list(trained), filtered=list(filtered))
        if not is_damaged:
            again.oldest, again.finished = dict(oldest), set(finished)
            assert overdue(again.states, step, prompts, staleness) == []
        play(again, later)
        again.end()
        again.check()
        assert not again.frontier.pending


@given(st.integers(1, 3), st.integers(1, 3), st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=12))
def test_what_is_too_old_to_be_trained_is_generated_again(
    prompts: int, staleness: int, begun: list[tuple[int, bool]]
) -> None:
    version, capacity = 6, (staleness + 1) * prompts
    states = [GroupState(index, oldest, True) for index, (oldest, _) in enumerate(begun[:capacity])]
    again = overdue(states, version, prompts, staleness)
    model = Model(prompts, staleness, steps=12, version=version)
    model.frontier = Frontier(len(states), tuple(range(len(states)))).filled(capacity)
    model.oldest = {state.index: state.oldest for state in states if state.oldest is not None}
    model.finished = {state.index for state in states}
    for index in again:
        del model.oldest[index]
        model.finished.discard(index)
    model.end()
    model.check()


def test_a_long_tail_is_carried_over_as_many_steps_as_the_bound_allows() -> None:
    def batch(version: int, *groups: tuple[int, int, bool]) -> tuple[int, ...] | None:
        return choose_batch([GroupState(*group) for group in groups], version, prompts=2, staleness=2)

    tail = (0, 0, False)
    assert batch(0, tail, (1, 0, True), (2, 0, True)) == (1, 2)
    assert batch(1, tail, (3, 1, True), (4, 1, True)) == (3, 4)
    assert batch(2, tail, (5, 2, True), (6, 2, True)) is None, "at version 3 its weights would be 3 steps behind"
    assert batch(2, (0, 0, True), (5, 2, True), (6, 2, True)) == (0, 5)


def test_deadlines_that_too_many_groups_share_are_seen_in_time() -> None:
    """Four groups of version 0 with a bound of 2 and batches of 2: two of them have to be trained at version 1."""
    tail = [GroupState(index, 0, False) for index in range(4)]
    fresh = [GroupState(index, 1, True) for index in (6, 7)]
    assert choose_batch([*tail, *fresh], 1, prompts=2, staleness=2) is None
    done = [GroupState(0, 0, True), GroupState(3, 0, True)]
    assert choose_batch([*tail[1:3], *done, *fresh], 1, prompts=2, staleness=2) == (0, 3)


def test_an_endpoint_that_keeps_its_weights_has_no_bound() -> None:
    groups = [GroupState(index, 0, index != 1) for index in range(4)]
    assert choose_batch(groups, 100, prompts=3, staleness=None) == (0, 2, 3)


def test_a_frontier_says_whether_another_one_follows_it() -> None:
    before = Frontier(10, (4, 8, 9))
    after = before.filled(5).without([4, 10])
    assert after == Frontier(12, (8, 9, 11))
    assert before.can_become(after, [4, 10])
    assert not before.can_become(after, [4]), "index 10 is lost"
    assert not before.can_become(after, [4, 10, 8]), "index 8 is trained and pending"
    assert not before.can_become(after, [4, 10, 10]), "index 10 is trained twice"
    assert not after.can_become(before, [])
