"""Every schedule is played through: nothing is forgotten, nobody waits for ever, nobody holds too much."""

from __future__ import annotations

from collections import Counter, deque
from itertools import product

import pytest

from craton.job.layout import Action, Schedule, forward_actions, schedule_actions, stage_layers
from craton.job.layout.schedules import in_flight_limit

SECONDS = {"forward": 1, "backward": 2, "input": 1, "weight": 1}
PIPELINES: list[tuple[Schedule, int, int, int]] = [
    (schedule, pp, vpp, micro_batches)
    for schedule, pp, vpp, micro_batches in product(
        ("1f1b", "interleaved", "zero-bubble"), (2, 3, 4, 8), (1, 2, 3), (1, 2, 3, 4, 7, 8, 16, 24)
    )
    if (vpp > 1) == (schedule == "interleaved") or schedule == "zero-bubble"
]


def play(actions: list[list[Action]], pp: int, vpp: int) -> int:
    """The length of the step when a message takes no time; fails when ranks wait for each other."""
    todo = [deque(each) for each in actions]
    ends: dict[tuple[str, int, int], int] = {}
    clock = [0] * pp
    while any(todo):
        moved = False
        for rank, waiting in enumerate(todo):
            while waiting:
                action = waiting[0]
                stage = action.chunk * pp + rank
                begins = [clock[rank]]
                for needed in needs(action, stage, pp * vpp):
                    if not any((kind, *needed[1:]) in ends for kind in needed[0]):
                        break
                    begins += [ends[kind, *needed[1:]] for kind in needed[0] if (kind, *needed[1:]) in ends]
                else:
                    clock[rank] = ends[action.kind, stage, action.micro_batch] = max(begins) + SECONDS[action.kind]
                    waiting.popleft()
                    moved = True
                    continue
                break
        assert moved, f"every rank waits: {[list(each)[:1] for each in todo]}"
    return max(clock)


def needs(action: Action, stage: int, stages: int) -> list[tuple[tuple[str, ...], int, int]]:
    """What must be done before: (one of these kinds, stage, micro-batch)."""
    if action.kind == "forward":
        return [(("forward",), stage - 1, action.micro_batch)] if stage else []
    if action.kind == "weight":
        return [(("input",), stage, action.micro_batch)]
    own = (("forward",), stage, action.micro_batch)
    return [own] if stage == stages - 1 else [own, (("backward", "input"), stage + 1, action.micro_batch)]


@pytest.mark.parametrize(("schedule", "pp", "vpp", "micro_batches"), PIPELINES)
def test_every_action_is_done_once_and_nobody_waits_for_ever(
    schedule: Schedule, pp: int, vpp: int, micro_batches: int
) -> None:
    actions = schedule_actions(schedule, pp, vpp, micro_batches)
    kinds = ("forward", "input", "weight") if schedule == "zero-bubble" else ("forward", "backward")
    expected = Counter(Action(kind, *each) for kind in kinds for each in product(range(vpp), range(micro_batches)))
    assert all(Counter(each) == expected for each in actions)
    assert play(actions, pp, vpp) >= 3 * vpp * micro_batches


@pytest.mark.parametrize(("schedule", "pp", "vpp", "micro_batches"), PIPELINES)
def test_messages_are_sent_in_the_order_in_which_they_are_taken(
    schedule: Schedule, pp: int, vpp: int, micro_batches: int
) -> None:
    actions = schedule_actions(schedule, pp, vpp, micro_batches)
    forwards = [forward_actions(pp, vpp, micro_batches)] * pp
    for orders in (actions, forwards):
        for rank, order in enumerate(orders):
            link = orders[(rank + 1) % pp]
            step = int(rank == pp - 1)  # the last rank's messages are for the next chunk of the first
            sent = [(each.chunk + step, each.micro_batch) for each in order if each.kind == "forward"]
            taken = [(each.chunk, each.micro_batch) for each in link if each.kind == "forward"]
            assert [each for each in sent if each[0] < vpp] == [each for each in taken if each[0] >= step]
            back = [(each.chunk, each.micro_batch) for each in link if each.kind in ("backward", "input")]
            wanted = [(each.chunk + step, each.micro_batch) for each in order if each.kind in ("backward", "input")]
            assert [each for each in back if each[0] >= step] == [each for each in wanted if each[0] < vpp]


@pytest.mark.parametrize(("schedule", "pp", "vpp", "micro_batches"), PIPELINES)
def test_no_rank_holds_more_activations_than_the_first_of_1f1b(
    schedule: Schedule, pp: int, vpp: int, micro_batches: int
) -> None:
    limit = in_flight_limit(pp, vpp)
    assert limit == (pp if vpp == 1 else 2 * (pp - 1) + (vpp - 1) * pp + 1)
    for rank, order in enumerate(schedule_actions(schedule, pp, vpp, micro_batches)):
        held = most = 0
        for action in order:
            held += {"forward": 1, "input": 0}.get(action.kind, -1)
            most = max(most, held)
        assert held == 0
        assert most <= limit
        if schedule == "1f1b":
            assert most == min(pp - rank, micro_batches)


@pytest.mark.parametrize(("pp", "vpp", "micro_batches"), [(2, 1, 4), (4, 1, 8), (8, 1, 32), (4, 2, 8), (4, 3, 16)])
def test_zero_bubble_waits_less(pp: int, vpp: int, micro_batches: int) -> None:
    plain: Schedule = "1f1b" if vpp == 1 else "interleaved"
    work = 3 * vpp * micro_batches
    bubble = play(schedule_actions(plain, pp, vpp, micro_batches), pp, vpp) - work
    assert bubble == 3 * (pp - 1)
    late = play(schedule_actions("zero-bubble", pp, vpp, micro_batches), pp, vpp) - work
    assert late < bubble
    if vpp == 1:  # (pp - 1) · (forward + input - weight), ZB-H1
        assert late == pp - 1


def test_more_chunks_make_a_smaller_share_of_waiting() -> None:
    assert play(schedule_actions("1f1b", 4, 1, 8), 4, 1) == 3 * (8 + 3)
    assert play(schedule_actions("interleaved", 4, 2, 8), 4, 2) == 3 * (16 + 3)  # of half the layers each


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "sizes"),
    [(4, 2, 1, [2, 2]), (5, 2, 2, [2, 1, 1, 1]), (126, 16, 1, [8] * 14 + [7] * 2), (30, 4, 2, [4] * 6 + [3] * 2)],
)
def test_layers_are_split_evenly_and_the_last_stage_has_fewer(layers: int, pp: int, vpp: int, sizes: list[int]) -> None:
    stages = stage_layers(layers, pp, vpp)
    assert [len(stage) for stage in stages] == sizes
    assert [layer for stage in stages for layer in stage] == list(range(layers))
