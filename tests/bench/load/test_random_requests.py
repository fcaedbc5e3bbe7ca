"""Random requests: the same for the same seed, as long as they should be, and sharing what they should, no more."""

from __future__ import annotations

from itertools import islice

import pytest

from craton.bench.load import Prefixes
from craton.bench.load.lengths import Lengths
from craton.bench.load.requests import FIRST_LEVEL, WARM_UP, Ids, RandomRequests, Request, Words, trial_prompt

IDS, WORDS = Ids(1000), Words()


def made(number: int = 200, stream: int = FIRST_LEVEL, **changed: object) -> list[Request]:
    settings = {"input": Lengths("uniform", 5, 50), "output": Lengths("uniform", 1, 9), "seed": 0, "form": IDS}
    requests = RandomRequests(**(settings | changed))  # type: ignore[arg-type]
    return list(islice(requests.stream(stream), number))


def beginnings(requests: list[Request], length: int) -> list[tuple[int, ...]]:
    return [tuple(request.prompt[:length]) for request in requests]  # type: ignore[arg-type]


def test_a_seed_is_a_workload() -> None:
    assert made(seed=3) == made(seed=3)
    assert made(seed=3) != made(seed=4)


def test_a_request_does_not_depend_on_how_many_were_made_before() -> None:
    requests = RandomRequests(Lengths("fixed", 8), Lengths("fixed", 8), 0, IDS)
    assert requests.request(FIRST_LEVEL, 5) == made(6, input=Lengths("fixed", 8), output=Lengths("fixed", 8))[5]


def test_loads_share_no_prompt() -> None:
    """Or a level of a sweep would find in the prefix cache what the one before left there."""
    shared = Prefixes(tokens=20, groups=2)
    seen = [
        set(beginnings(made(50, stream, prefixes=shared), 20)) for stream in (WARM_UP, FIRST_LEVEL, FIRST_LEVEL + 1)
    ]
    assert [len(each) for each in seen] == [2, 2, 2]
    assert len(set.union(*seen)) == 6


def test_lengths_are_those_asked_for_whatever_prompts_are_made_of() -> None:
    ids, words = made(), made(form=WORDS)
    assert {len(request.prompt) for request in ids} == set(range(5, 51))
    assert [len(request.prompt) for request in ids] == [len(str(request.prompt).split()) for request in words]
    assert [request.output_tokens for request in ids] == [request.output_tokens for request in words]
    assert {request.output_tokens for request in ids} == set(range(1, 10))


def test_ids_stay_inside_of_the_vocabulary_and_off_its_special_beginning() -> None:
    seen = {token for request in made() for token in request.prompt}
    assert min(seen) == 10  # type: ignore[type-var]
    assert max(seen) == 999  # type: ignore[type-var]
    assert set(made(1, form=Ids(2), input=Lengths("fixed", 50))[0].prompt) == {1}  # type: ignore[comparison-overlap]


def test_prefixes_are_shared_by_their_share_in_their_groups() -> None:
    requests = made(2000, prefixes=Prefixes(tokens=30, groups=4, share=0.5))
    starts = beginnings(requests, 30)
    common = {start for start in starts if starts.count(start) > 1}
    assert len(common) == 4
    share = sum(start in common for start in starts) / len(starts)
    assert 0.45 < share < 0.55


def test_lengths_do_not_depend_on_the_share_of_prefixes() -> None:
    with_prefix, without = (made(prefixes=Prefixes(30, 1, share)) for share in (1.0, 0.0))
    assert {len(request.prompt) for request in with_prefix} == {len(request.prompt) for request in without}
    assert min(len(request.prompt) for request in with_prefix) == 35


def test_words_make_as_many_tokens_as_asked() -> None:
    """With 2.5 tokens a word and 20 of a template, prefix and prompt together."""
    form = Words(tokens_per_word=2.5, template_tokens=20)
    requests = made(50, form=form, input=Lengths("fixed", 100), prefixes=Prefixes(50, 1, 0.5))
    assert {len(str(request.prompt).split()) for request in requests} == {round((150 - 20) / 2.5)}


def test_a_prompt_is_never_empty() -> None:
    assert len(str(made(1, form=Words(1.0, 500.0))[0].prompt).split()) == 1


@pytest.mark.parametrize("seed", [0, 1])
def test_the_trial_ends_with_the_largest_id(seed: int) -> None:
    prompt = trial_prompt(16, IDS, seed)
    assert len(prompt) == 16
    assert prompt[-1] == 999
