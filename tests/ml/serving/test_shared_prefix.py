"""Answers are the same whether or not attention reads a shared prefix once per group; groups save the predicted
reads."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from model_pairs import VOCABULARY, pair

from craton.ml.serving.engine.build import build_engine, bytes_of_block
from craton.ml.serving.engine.engine import Engine
from craton.ml.serving.messages import OutputDelta, Sampling, Stats, Submit
from craton.ml.serving.schedule import PrefixGroups, StepInput
from craton.ml.serving.schedule.prefix import PrefixNode
from craton.ml.serving.schedule.sequence import Sequence
from craton.ml.serving.schedule.shared_prefix import MAX_GROUPS, PrefixGrouping, group_by_prefix, is_worthwhile
from craton.ml.serving.settings import EngineSettings, ServingError, SharingCosts

PAGE = 4


@pytest.fixture
def any_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every group is worthwhile, however short its prefix."""
    monkeypatch.setattr("craton.ml.serving.schedule.shared_prefix.MEMBER_TOKENS", 0)
    monkeypatch.setattr("craton.ml.serving.schedule.shared_prefix.GROUP_TOKENS", 0)


# -- groups -----------------------------------------------------------------------------------------------------------


def path(parent: PrefixNode, length: int) -> list[PrefixNode]:
    nodes = []
    for _ in range(length):
        parent = PrefixNode(parent, (), 1)
        nodes.append(parent)
    return nodes


def requests(*paths: list[PrefixNode]) -> list[Sequence]:
    sequences = []
    for number, nodes in enumerate(paths):
        for node in nodes:
            node.users += 1
        sequences.append(Sequence(number, 0, [], Sampling(), 0, 0, nodes=nodes, row=10 + number))
    return sequences


def as_lists(groups: PrefixGroups | None) -> list[tuple[list[int], int, int]]:
    """The members, row and tokens of each group."""
    if groups is None:
        return []
    begins = [0, *groups.ends.tolist()]
    members = [groups.members[begin:end].tolist() for begin, end in pairwise(begins)]
    return list(zip(members, groups.rows.tolist(), groups.tokens.tolist(), strict=True))


@pytest.mark.parametrize(
    ("members", "tokens", "is_useful"),
    [(2, 1152, False), (2, 1153, True), (64, 80, False), (64, 82, True), (1, 100_000, False)],
)
def test_a_group_is_worthwhile_when_it_saves_more_than_it_costs(members: int, tokens: int, is_useful: bool) -> None:
    assert is_worthwhile(members, tokens) == is_useful


@pytest.mark.usefixtures("any_group")
def test_a_request_takes_the_path_with_the_largest_saving() -> None:
    root = PrefixNode(None, (), None)
    system = path(root, 2)
    first, second = path(system[-1], 6), path(system[-1], 1)
    sequences = requests(
        [*system, *first, *path(first[-1], 3)],
        [*system, *second],
        path(root, 9),
        [*system, *first],
        [*system, *path(system[-1], 1)],
        [*system, *second, *path(second[-1], 2)],
    )
    groups = group_by_prefix(sequences, PAGE)
    # the long paths of two save 16 tokens for each of them, the short one of four saves the others 6
    assert as_lists(groups) == [([0, 3], 10, 8 * PAGE), ([1, 4, 5], 11, 2 * PAGE)]
    assert groups is not None
    assert groups.saved_tokens == 8 * PAGE + 2 * 2 * PAGE


def test_no_more_groups_than_the_kernels_take(any_group: None) -> None:
    root = PrefixNode(None, (), None)
    shared = [path(root, 1 + number) for number in range(MAX_GROUPS + 3)]
    groups = as_lists(group_by_prefix(requests(*(nodes for nodes in shared for _ in range(2))), PAGE))
    assert [tokens // PAGE for _, _, tokens in groups] == list(range(MAX_GROUPS + 3, 3, -1))  # those that save most


def test_groups_follow_ends_and_starts(any_group: None) -> None:
    root = PrefixNode(None, (), None)
    shared = path(root, 3)
    sequences = requests(shared, shared, [*shared, *path(shared[-1], 1)])
    grouping = PrefixGrouping(PAGE, SharingCosts())
    first = grouping.groups(sequences, 0)
    assert as_lists(first) == [([0, 1, 2], 10, 3 * PAGE)]
    assert grouping.groups(list(sequences), 0) is first
    ended = sequences.pop(0)
    for node in ended.nodes:
        node.users -= 1
    assert as_lists(grouping.groups(sequences, 1)) == [([0, 1], 11, 3 * PAGE)]
    for node in sequences.pop(0).nodes:
        node.users -= 1
    assert grouping.groups(sequences, 2) is None


def test_groups_are_read_together_only_if_the_step_saves_more_than_that_costs_the_device() -> None:
    root = PrefixNode(None, (), None)
    shared = path(root, 2000)
    sequences = requests(*[shared] * 4, path(root, 1))
    for sequence, computed in zip(sequences, [8000, 8100, 8200, 8300, 50_000], strict=True):
        sequence.computed = computed
    rest = 82_600 - 3 * 8000  # tokens that a step reads with sharing, where it saves 3 · 8000
    for costs, is_shared in (
        (SharingCosts(), True),
        (SharingCosts(10_000, 0.2), True),
        (SharingCosts(10_000, 14_001 / rest), False),
        (SharingCosts(24_001, 0.0), False),
    ):
        assert (PrefixGrouping(PAGE, costs).groups(sequences, 0) is not None) == is_shared


# -- answers ----------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """The answers of an engine, and what it sent to its device."""

    engine: Engine
    tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    logprobs: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    work: list[StepInput] = field(default_factory=list)

    def step(self, count: int = 3000) -> None:
        for _ in range(count):
            if self.engine.is_idle:
                return
            for piece in self.engine.step():
                self.note(piece)
            self.engine.check()
        assert count < 3000, "requests do not end"

    def note(self, piece: OutputDelta) -> None:
        assert not piece.error
        self.tokens.setdefault((piece.id, piece.index), []).extend(piece.tokens)
        self.logprobs.setdefault((piece.id, piece.index), []).extend(piece.logprobs)

    def submit(self, number: int, prompt: list[int], copies: int = 1, max_tokens: int = 12) -> None:
        sampling = Sampling(max_tokens=max_tokens, temperature=0.8 * (number % 2), seed=100 * number)
        self.engine.submit(Submit(number, tuple(prompt), sampling, copies))

    @property
    def stats(self) -> Stats:
        return self.engine.stats()


def text(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(VOCABULARY) for _ in range(length)]


def run(scenario: Callable[[Run], None], family: str = "llama", **options: object) -> Run:
    model = pair(family)[1]
    values: dict[str, object] = {"max_length": 96, "max_running": 8, "page": PAGE, "blocks": 400, "chunk_tokens": 64}
    settings = EngineSettings(**{**values, **options})  # type: ignore[arg-type]
    if settings.host_bytes:
        settings = EngineSettings(**{**settings.__dict__, "host_bytes": 200 * bytes_of_block(model, settings)})
    result = Run(build_engine(model, settings))
    execute = result.engine._executor.execute
    result.engine._executor.execute = lambda work: (result.work.append(work), execute(work))[1]  # type: ignore[method-assign,func-returns-value]
    scenario(result)
    result.step()
    return result


def copies(run: Run) -> None:
    """Two groups of different lengths of life, and a request in none."""
    run.submit(1, text(1, 26), copies=4, max_tokens=9)
    run.submit(2, text(2, 17), copies=3, max_tokens=20)
    run.submit(3, text(3, 9))


def system_prompts(run: Run) -> None:
    """Requests that come at once compute the same prompt twice; others start and end while these decode."""
    for number in range(5):
        run.submit(number, [*text(1, 22), *text(10 + number, 1 + number)], max_tokens=8 + 3 * number)
    run.step(9)
    for number in range(5, 9):
        run.submit(number, [*text(number % 2, 22), *text(10 + number, 3)], max_tokens=10)


def forks(run: Run) -> None:
    run.submit(1, text(1, 21), max_tokens=25)
    run.submit(2, text(2, 13), max_tokens=16)
    run.step(12)
    for branch in range(3):
        run.engine.fork(1, 0, 10 + branch, Sampling(max_tokens=22, temperature=0.7, seed=branch))
    run.step(4)
    run.engine.fork(1, 0, 20, Sampling(max_tokens=24, temperature=0.7, seed=9))


def weights(run: Run) -> None:
    """Requests of two versions of the weights share no blocks."""
    run.submit(1, text(1, 20), copies=3, max_tokens=16)
    run.step(6)
    for piece in run.engine.change_version():
        run.note(piece)
    run.submit(2, text(1, 20), copies=2, max_tokens=8)


def crowd(run: Run) -> None:
    """More than the blocks hold: some are preempted, and evicted prefixes come back."""
    run.submit(0, [1, 2], max_tokens=1)
    run.step()
    for number in range(1, 7):
        run.submit(number, [*text(1, 18), *text(number, 4)], copies=1 + number % 3, max_tokens=18)
    run.step(30)
    for number in (50, 51):
        run.submit(number, text(number, 80), max_tokens=4)
    run.step()
    run.submit(60, [*text(1, 18), 5], copies=3)


CASES = [
    pytest.param(copies, {}, marks=pytest.mark.slow),
    (copies, {"graphs": "always", "family": "qwen3"}),
    (system_prompts, {}),
    pytest.param(system_prompts, {"graphs": "always", "overlap": False}, marks=pytest.mark.slow),
    (forks, {"graphs": "always"}),
    pytest.param(forks, {"graphs": "always", "family": "deepseek_v3"}, marks=pytest.mark.slow),
    (weights, {}),
    pytest.param(crowd, {"blocks": 40, "preemptions": True}, marks=pytest.mark.slow),
    (crowd, {"blocks": 40, "host_bytes": 1, "preemptions": True}),
]


@pytest.mark.usefixtures("any_group")
@pytest.mark.parametrize(("scenario", "options"), CASES)
def test_answers_are_those_without_sharing(scenario: Callable[[Run], None], options: dict[str, object]) -> None:
    options = dict(options)
    preempts = options.pop("preemptions", False)
    ours = run(scenario, shared_prefix="on", **options)  # type: ignore[arg-type]
    theirs = run(scenario, shared_prefix="off", **options)  # type: ignore[arg-type]
    assert ours.tokens == theirs.tokens
    for key, logprobs in theirs.logprobs.items():
        assert ours.logprobs[key] == pytest.approx(logprobs, abs=1e-5)
    assert theirs.stats.shared_tokens == 0
    assert ours.stats.shared_tokens > 0.2 * ours.stats.context_tokens
    assert bool(ours.stats.preemptions) == preempts
    assert bool(ours.stats.host_hits) == ("host_bytes" in options)


@pytest.mark.usefixtures("any_group")
def test_copies_read_their_prompt_once_per_step() -> None:
    """Six copies of 26 tokens share 6 full blocks, from the step on after which all know them. Five of them compute the
    last token of the prompt again, so they are a step behind the first."""

    def scenario(run: Run) -> None:
        run.submit(1, text(1, 26), copies=6, max_tokens=30)

    stats, work = (ours := run(scenario, shared_prefix="on", overlap=False)).stats, ours.work
    assert [len(each.rows) for each in work] == [1, *[6] * 29, 5]
    assert stats.context_tokens == 6 * sum(range(26, 26 + 30))
    expected = [0, 0, *[5 * 24] * 28, 4 * 24]  # in the first step of all six, only the first knows its blocks
    assert [0 if each.groups is None else each.groups.saved_tokens for each in work] == expected
    assert stats.shared_tokens == sum(expected)


def test_a_prompt_computed_twice_at_once_is_kept_once() -> None:
    def scenario(run: Run) -> None:
        for number in range(4):
            run.submit(number, [*text(1, 24), number], max_tokens=24)
        run.step(20)
        assert run.stats.prefix_hits < 4 * 24 - 24  # two or more computed it
        used.append(run.stats.blocks_used)

    used: list[int] = []
    for shared_prefix in ("on", "off"):
        run(scenario, shared_prefix=shared_prefix)
    assert used[0] <= used[1] - 24 // PAGE


def test_auto_shares_and_too_short_prefixes_are_read_by_each_request() -> None:
    ours = run(copies)
    assert ours.engine.settings.shared_prefix == "on"
    assert all(each.groups is None for each in ours.work)


def test_an_unknown_value_is_refused() -> None:
    with pytest.raises(ServingError, match="shared_prefix is 'yes'; allowed: auto, on, off"):
        EngineSettings(shared_prefix="yes")  # type: ignore[arg-type]
