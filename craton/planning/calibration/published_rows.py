"""The published runs as rows of a fit: terms, labels and priors of every case.

Fields that a source leaves open take the planner's own choice: the fastest by the priors.
"""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache
from itertools import product

import numpy as np

from craton.job.layout import Layout
from craton.planning.calibration.cases import Case, data_folder, load_cases
from craton.planning.calibration.measured_steps import own_runs
from craton.planning.fitting import EXPERT_NOISE, EXPERT_UNSHARED, NOISE, OPEN_NOISE, Fit, FitRow
from craton.planning.rates import MachineRates, machine
from craton.planning.software import prior_log
from craton.planning.step import TRAINING_STEP, StepTerms, Workload, compose, stack, step_terms

MICRO_BATCHES = (1, 2, 4, 8)
EXPERT_PARALLEL = (1, 2, 4, 8, 16, 32, 64)
MAX_STAGES_A_RANK = 12


def corpus_path() -> str:
    return str(data_folder() / "training_results.json")


@lru_cache(maxsize=1)
def corpus() -> tuple[Case, ...]:
    """Return the published runs that the shipped constants were fitted to."""
    return tuple(load_cases(corpus_path())[0])


@lru_cache(maxsize=4096)
def row_of(case: Case) -> FitRow[StepTerms]:
    return FitRow(
        case_terms(case),
        math.log(case.measured_step_seconds),
        labels_of(case),
        prior_log(case.traits),
        NOISE * (OPEN_NOISE if case.quality != "A" else 1.0) * (EXPERT_NOISE if case.shape.is_moe else 1.0),
        EXPERT_UNSHARED if case.shape.is_moe else 1.0,
    )


@lru_cache(maxsize=1)
def fitted_cases() -> tuple[Case, ...]:
    """Return the runs that the shipped profiles are fitted to: published ones and Craton's own."""
    return (*corpus(), *(run.case() for run in own_runs()))


@lru_cache(maxsize=1)
def corpus_fit() -> Fit[StepTerms]:
    """Return the posterior of all measured runs."""
    return Fit(TRAINING_STEP, [row_of(case) for case in fitted_cases()])


def case_machine(case: Case) -> MachineRates:
    published = case.machine
    return machine(
        published.gpu,
        published.node_gpus,
        published.nvlink_domain,
        published.nic_bytes_per_second,
        published.efa_version,
    )


def labels_of(case: Case) -> dict[str, str]:
    return effect_labels(
        family=case.family,
        release=case.release,
        gpu=case.machine.gpu,
        generation=case_machine(case).gpu.generation,
        model=case.shape.name,
        moe=case.shape.is_moe,
    )


def effect_labels(
    *, family: str, release: str, gpu: str, generation: str, model: str = "", moe: bool | None = None
) -> dict[str, str]:
    """Return the labels of effects that a run shares with others. An empty label shares nothing."""
    kind = "" if moe is None else "moe" if moe else "dense"
    return {
        "all": "all",
        "generation": generation,
        "family": family,
        "release": f"{family}/{release}" if release else "",
        "family-gpu": f"{family}/{gpu}" if family else "",
        "family-scale": family,
        "release-kind": f"{family}/{release}/{kind}" if release and kind else "",
        "model": f"{family}/{model}" if model else "",
        "group": f"{family}/{gpu}/{model}" if model else "",
    }


def case_terms(case: Case) -> StepTerms:
    """Return the terms of the case's layout, open fields filled with the fastest choice under the priors."""
    candidates = [_terms(case, layout) for layout in _layouts(case)]
    if len(candidates) == 1:
        return candidates[0]
    seconds = compose(stack(candidates), np.exp(np.array(prior_log(case.traits)))).step_seconds
    return candidates[int(np.argmin(seconds))]


def case_workload(case: Case, layout: Layout) -> Workload:
    return Workload(
        case.shape,
        layout,
        case.sequence,
        case.global_batch_sequences,
        case.lora,
        weights=case.weights,
        adjacent_experts=True,
    )


def _terms(case: Case, layout: Layout) -> StepTerms:
    place = case_machine(case)
    work = case_workload(case, layout)
    return step_terms(work, place.rates, place.network, case.traits)


def _layouts(case: Case) -> list[Layout]:
    layout, shape = case.layout, case.shape
    micro_batches = [layout.micro_batch]
    expert_parallel = [layout.ep]
    stages = [layout.vpp]
    if "micro_batch" in case.open_fields:
        ranks = layout.data_parallel
        micro_batches = [size for size in MICRO_BATCHES if case.global_batch_sequences % (ranks * size) == 0]
    if "ep" in case.open_fields:
        ranks = layout.data_parallel * layout.cp * layout.tp
        expert_parallel = [size for size in EXPERT_PARALLEL if shape.experts % size == 0 and ranks % size == 0]
    if "vpp" in case.open_fields:
        stages = [v for v in range(1, MAX_STAGES_A_RANK + 1) if v == 1 or shape.layers % (layout.pp * v) == 0]
    return [
        dataclasses.replace(layout, micro_batch=micro_batch, ep=ep, vpp=vpp)
        for micro_batch, ep, vpp in product(micro_batches or [1], expert_parallel, stages)
    ]
