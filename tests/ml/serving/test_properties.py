"""Whatever comes in whatever order: no block is lost, none has two owners, every request ends.

The device is a stand-in that chooses tokens at random: what is tested is who holds what, over far more steps than a
model could compute here. Its KV cache has, for each token, a hash of the tokens up to it and the version of the
weights. So a request that shares or copies a block of another text is found.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from unittest.mock import patch

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from craton.ml.serving.device import StepResult
from craton.ml.serving.engine.engine import Engine
from craton.ml.serving.messages import Abort, Sampling, Submit
from craton.ml.serving.schedule import Move, StepInput, independent_moves
from craton.ml.serving.schedule import Sequence as RunningSequence
from craton.ml.serving.settings import EngineSettings, ServingError

VOCABULARY, MAX_LENGTH = 4, 40  # few tokens, so that texts begin alike
Entry = tuple[int, int]  # of a KV cache: a hash of the tokens up to one, and the version of the weights
NOTHING: Entry = (0, -1)


def hash_of(before: int, token: int) -> int:
    return hash((before, token))


class Device:
    """Chooses at random, and checks that nobody writes where another one reads."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.version = 0
        self.running: Callable[[], Iterable[RunningSequence]] = tuple
        self.table: dict[tuple[int, int], int] = {}
        self.next_token: dict[int, int] = {}
        self.cache: dict[int, list[Entry]] = {}
        self.host_cache: dict[int, list[Entry]] = {}
        self.random = random.Random(0)
        self.saved_tokens = 0

    def move(self, moves: Sequence[Move]) -> None:
        """Copy blocks; those that can be copied at once are read first, then written in any order."""
        tiers = {
            "copy": (self.cache, self.cache),
            "out": (self.cache, self.host_cache),
            "in": (self.host_cache, self.cache),
        }
        for at_once in independent_moves(moves):
            source, target = tiers[at_once[0].kind]
            blocks = [list(source.get(move.source, ())) for move in at_once]
            for move, block in self.random.sample(list(zip(at_once, blocks, strict=True)), len(at_once)):
                target[move.target] = block

    def entry(self, row: int, place: int) -> Entry:
        """What the KV cache has at a place of a request."""
        block = self.cache.get(self.table[row, place // self.page], [])
        return block[place % self.page] if place % self.page < len(block) else NOTHING

    def write(self, work: StepInput) -> None:
        """Compute the tokens of a step over what the KV cache has."""
        self.next_token |= dict(work.next_tokens)
        sent = iter(work.tokens.tolist())
        rows = zip(work.rows.tolist(), work.counts.tolist(), work.lengths.tolist(), strict=True)
        for index, (row, count, length) in enumerate(rows):
            for place in range(length - count, length):
                token = self.next_token[row] if index < work.decode else next(sent)
                before = self.entry(row, place - 1)[0] if place else 0
                block = self.cache.setdefault(self.table[row, place // self.page], [])
                block += [NOTHING] * (self.page - len(block))
                block[place % self.page] = (hash_of(before, token), self.version)

    def execute(self, work: StepInput) -> StepResult:
        self.move(work.moves)
        places = [(row, column) for row, column, _ in work.table]
        assert len(places) == len(set(places)), "two blocks for one place"
        for row, column, block in work.table:
            self.table[row, column] = block
        self.check_groups(work)
        written: set[int] = set()
        for row, count, length in zip(work.rows.tolist(), work.counts.tolist(), work.lengths.tolist(), strict=True):
            for place in range(length - count, length):
                slot = self.table[row, place // self.page] * self.page + place % self.page
                assert slot >= self.page, "the dummy's block is nobody's"
                assert slot not in written, "two tokens in one place"
                written.add(slot)
        self.write(work)
        for sequence in self.running():
            if sequence.row in work.rows:
                self.check_sequence(sequence)
        count = len(work.sampled)
        tokens = [self.random.randrange(VOCABULARY) for _ in range(count)]
        self.next_token |= dict(zip(work.sampled_rows.tolist(), tokens, strict=True))
        return StepResult(torch.tensor(tokens, dtype=torch.int64), torch.zeros(count), None, [])

    def check_sequence(self, sequence: RunningSequence) -> None:
        """The KV cache of a request has its own tokens, of one version of the weights if others may read it."""
        before = 0
        for place, token in enumerate(sequence.tokens[: sequence.computed]):
            before = hash_of(before, token)
            found, version = self.entry(sequence.row, place)
            assert found == before, f"place {place} has another text"
            assert sequence.is_private or version == sequence.version, f"place {place} is of other weights"

    def check_groups(self, work: StepInput) -> None:
        """What a group reads once is what each of its members would read, before the token that it decodes."""
        if work.groups is None:
            return
        self.saved_tokens += work.groups.saved_tokens
        members, begin = work.groups.members.tolist(), 0
        assert len(members) == len(set(members))
        for end, row, tokens in zip(work.groups.ends, work.groups.rows, work.groups.tokens, strict=True):
            assert end - begin > 1
            for member in members[begin:end]:
                assert member < work.decode
                assert tokens < work.lengths[member]
                for column in range(tokens // self.page):
                    assert self.table[int(work.rows[member]), column] == self.table[int(row), column]
            begin = end


Action = tuple[str, int, int, int]
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["submit", "submit", "again", "again", "abort", "fork", "step", "step", "version", "forget", "release"]
        ),
        st.integers(0, 2**16),
        st.integers(1, 30),
        st.integers(1, 3),
    ),
    max_size=60,
)


@patch("craton.ml.serving.schedule.shared_prefix.MEMBER_TOKENS", 0)
@patch("craton.ml.serving.schedule.shared_prefix.GROUP_TOKENS", 0)
@settings(max_examples=400)
@given(
    ACTIONS,
    st.sampled_from([1, 2, 4]),
    st.sampled_from([3, 16, 64]),
    st.integers(0, 12),
    st.sampled_from([0, 2]),
    st.booleans(),
    st.sampled_from(["on", "off"]),
)
def test_every_request_ends_and_blocks_are_conserved(
    actions: list[Action], page: int, chunk: int, host_blocks: int, drafts: int, overlap: bool, shared_prefix: str
) -> None:
    blocks = MAX_LENGTH // page + 3
    options = EngineSettings(
        max_running=4,
        chunk_tokens=chunk,
        page=page,
        draft_tokens=drafts,
        overlap=overlap,
        shared_prefix=shared_prefix,  # type: ignore[arg-type]
    )
    device = Device(page)
    engine = Engine(device, options, VOCABULARY, MAX_LENGTH, blocks, host_blocks, stop_tokens=(0,))
    device.running = lambda: engine.scheduler.running
    open_requests: dict[int, set[int]] = {}
    ended: dict[tuple[int, int], int] = {}
    copies: dict[int, int] = {}
    seen: dict[RunningSequence, None] = {}

    def step() -> None:
        scheduler = engine.scheduler
        before, preempted = list(scheduler.running), scheduler.counters.preemptions
        for piece in engine.step():
            note(piece.id, piece.index, piece.finish)
        engine.check()
        seen.update(scheduler.running)
        gone = [each for each in before if each.row < 0 and each.finish is None]
        if len(gone) == scheduler.counters.preemptions - preempted:  # and nobody came back in the same step
            best_gone = min((each.priority for each in gone), default=99)
            worst = max((each.priority for each in before if each.row >= 0), default=-1)
            assert worst <= best_gone, "one of a better priority had to leave"

    def note(number: int, index: int, finish: str | None) -> None:
        assert (number, index) not in ended, "a piece after the last one"
        if finish is not None:
            ended[number, index] = 1
            open_requests[number].discard(index)

    for number, (what, seed, length, count) in enumerate(actions):
        generator = random.Random(seed)
        running = [each for each, left in open_requests.items() if left]
        if what in ("submit", "again"):  # again: a text that continues another one, from any of its tokens on
            known = list(seen)[-generator.randint(1, 8) :][0].tokens if what == "again" and seen else ()
            known = known[: generator.choice([generator.randint(0, length), 30])]
            prompt = (*known, *(generator.randrange(VOCABULARY) for _ in range(max(1, length - len(known)))))
            sampling = Sampling(max_tokens=generator.choice([2, generator.randint(1, 20)]))
            engine.submit(Submit(number, prompt, sampling, count, priority=generator.randint(0, 2)))
            open_requests[number], copies[number] = set(range(count)), count
        elif what == "abort" and running:
            chosen, copy = generator.choice(running), generator.choice([None, 0, 1])
            engine.abort(Abort(chosen, copy))
        elif what == "fork" and running:
            parent = generator.choice(running)
            index = generator.choice(sorted(open_requests[parent]))
            try:
                engine.fork(parent, index, 10_000 + number)
            except ServingError:  # it waits, or has written all it may
                continue
            open_requests[10_000 + number] = {0}
        elif what == "version":
            for piece in engine.change_version(recompute=bool(seed % 2)):
                note(piece.id, piece.index, piece.finish)
            device.version = engine.version
        elif what == "forget":
            engine.forget()
        elif what == "release":
            for piece in engine.release():
                note(piece.id, piece.index, piece.finish)
        step()
    for _ in range(5000):
        if engine.is_idle:
            break
        step()
    assert engine.is_idle, "requests do not end"
    assert not any(open_requests.values()), "a copy without an end"
    assert engine.stats().blocks_used == 0
    assert engine.stats().shared_tokens == device.saved_tokens
