"""Published runs as rows of a fit: what a source leaves open takes the choice that the planner would make."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from craton.planning.calibration import Case, corpus, row_of
from craton.planning.calibration.published_rows import case_terms, labels_of
from craton.planning.software import prior_log
from craton.planning.step import compose


def seconds(case: Case) -> float:
    return float(compose(case_terms(case), np.exp(np.array(prior_log(case.traits)))).step_seconds)


def test_an_open_micro_batch_takes_the_fastest() -> None:
    case = next(case for case in corpus() if case.open_fields == ("micro_batch",))
    per_rank = case.global_batch_sequences // case.layout.data_parallel
    stated = [
        seconds(replace(case, layout=replace(case.layout, micro_batch=size), open_fields=()))
        for size in (1, 2, 4, 8)
        if per_rank % size == 0
    ]
    assert len(stated) > 1
    assert seconds(case) == pytest.approx(min(stated))
    assert min(stated) < max(stated)


def test_open_stages_take_the_fastest_that_divides_the_layers() -> None:
    case = next(case for case in corpus() if case.open_fields == ("vpp",) and case.layout.pp > 1)
    layers, pp = case.shape.layers, case.layout.pp
    stated = [
        seconds(replace(case, layout=replace(case.layout, vpp=vpp), open_fields=()))
        for vpp in range(1, 13)
        if vpp == 1 or layers % (pp * vpp) == 0
    ]
    assert seconds(case) == pytest.approx(min(stated))


def test_what_is_stated_is_kept() -> None:
    case = next(case for case in corpus() if not case.open_fields and case.layout.micro_batch == 1)
    slower = replace(case, layout=replace(case.layout, recompute="full"))
    assert seconds(slower) > seconds(case)


def test_every_row_has_its_own_group_and_its_publishers_labels() -> None:
    for case in corpus()[::20]:
        labels = labels_of(case)
        assert labels["family"] == case.family
        assert labels["group"] == "/".join(case.group)
        assert all(labels.values())  # an empty one would share nothing
        assert row_of(case) is row_of(case)
        assert np.exp(row_of(case).log_measured) == pytest.approx(case.measured_step_seconds)
