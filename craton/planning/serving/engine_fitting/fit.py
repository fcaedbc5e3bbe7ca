"""The fit of engine constants to published measurements of servers: rows, labels and the composition of their seconds.

It is the hierarchical fit of training (`craton.planning.fitting`) with another composition. A row's value is its TPOT,
its TTFT, or the seconds of a GPU per output token.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np

from craton.infrastructure.catalog import gpu as catalog_gpu
from craton.planning.fitting import Array, Composition, Fit, FitRow, Prediction
from craton.planning.serving.closed_load import closed_loop
from craton.planning.serving.engine_fitting.cases import ServingCase, architecture, own_serving_cases, serving_corpus
from craton.planning.serving.layout import ServedLayout
from craton.planning.serving.own_engine import MAX_RUNNING, STEP_TOKENS
from craton.planning.serving.poisson_load import poisson_load
from craton.planning.serving.profile import ENGINE_NAMES, ENGINE_SPREAD, METRICS, OWN_ENGINE, engine_prior_log
from craton.planning.serving.step_times import ServedSteps
from craton.planning.serving.terms import ServingTerms, serving_terms, stack_terms

KINDS = ("closed", "open", "offline", "decode", "prefill", "batch")
OFFLINE = 1e9  # requests that are queued in an offline run
POOL_ROUNDS = 12
SERVING_LEVELS = {"all": 0.5, "generation": 0.3, "engine": 0.7, "version": 0.4, "engine-gpu": 0.4}
SERVING_SCALES = {
    "model": 0.08,
    "group": 0.10,
    "group-metric": 0.06,
    "source-metric": 0.08,
    "engine-metric": 0.05,
    "version-model": 0.08,
    "ttft-model": 0.2,
    "ttft-group": 0.2,
    # Of models that can draft their own tokens most sources do not say whether they do.
    "drafts-group": 0.2,
    "drafts": 0.2,
}
TTFT_EFFECTS = ("ttft-model", "ttft-group")
DRAFT_EFFECTS = ("drafts-group", "drafts")
SERVING_NOISE = {"tpot_seconds": 0.06, "ttft_seconds": 0.26, "tokens_per_second_per_gpu": 0.07}
OPEN_LAYOUT_NOISE = 2.5  # factor on the noise where a layout was searched
OWN_NOISE = 0.5  # factor on the noise of our own server, whose settings are all known; not of random arrivals


@dataclass(frozen=True)
class ServedRow:
    """One measurement: the terms of its server or decode pool, of its prefill pool, and its load; stacked: arrays."""

    decode: ServingTerms
    prefill: ServingTerms
    metric: Any  # index in METRICS
    kind: Any  # index in KINDS
    pooled: Any  # 1 with a prefill pool
    workers: Any  # replicas
    prefill_workers: Any
    prompt: Any
    output: Any
    concurrency: Any
    rate: Any
    first_wave: Any
    cached: Any
    draft_tokens: Any
    accepted_tokens: Any


def stack_rows(rows: Sequence[ServedRow]) -> ServedRow:
    values = {
        field.name: np.array([getattr(row, field.name) for row in rows], float)
        for field in fields(ServedRow)
        if field.name not in ("decode", "prefill")
    }
    return ServedRow(
        decode=stack_terms([row.decode for row in rows]), prefill=stack_terms([row.prefill for row in rows]), **values
    )


def served_seconds(row: ServedRow, constants: Any) -> Array:
    """Return the seconds of each row's metric; a throughput is the seconds of a GPU per output token."""
    named = dict(zip(ENGINE_NAMES, constants, strict=True))
    steps = ServedSteps(row.decode, constants)
    pool = ServedSteps(row.prefill, constants)
    dp, workers = row.decode.attention_dp, row.workers
    first = named["first_token_seconds"] * row.prefill.first_token_factor
    context = row.prompt + 0.5 * row.output
    share = np.minimum(named["burst"] * row.first_wave, 0.9)
    # Requests of one replica; an offline run keeps every replica full.
    concurrency = np.where(row.kind == KINDS.index("offline"), OFFLINE, np.maximum(row.concurrency / workers, 1.0))
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        closed = closed_loop(
            steps,
            concurrency,
            row.prompt,
            row.output,
            first_token_seconds=first,
            prefill_slowdown=named["prefill_slowdown"],
            attention_dp=dp,
            balance_steps=named["balance_steps"],
            cached=row.cached,
        )
        tpot = closed.tpot_seconds
        ttft = closed.mean_ttft_seconds(share)
        per_token = row.decode.gpus / (closed.mean_requests_per_second(share) * row.output)
        # Speculative decoding verifies the drafts of each request in one step.
        drafting = steps.verify_seconds(concurrency, context, row.draft_tokens)
        tpot = np.where(row.draft_tokens > 0, drafting / row.accepted_tokens, tpot)

        pooled = row.pooled > 0
        if pooled.any():
            pooled_tpot, pooled_ttft, pooled_rate = _pools(row, steps, pool, first, share)
            tpot, ttft = np.where(pooled, pooled_tpot, tpot), np.where(pooled, pooled_ttft, ttft)
            gpus = row.decode.gpus * workers + row.prefill.gpus * row.prefill_workers
            per_token = np.where(pooled, gpus / (pooled_rate * row.output), per_token)

        is_open = row.kind == KINDS.index("open")
        if is_open.any():
            arriving = poisson_load(
                steps,
                row.rate / workers,
                row.prompt,
                row.output,
                first_token_seconds=first,
                prefill_slowdown=named["prefill_slowdown"],
                cached=row.cached,
            )
            tpot = np.where(is_open, arriving.tpot_seconds, tpot)
            ttft = np.where(is_open, arriving.ttft_seconds, ttft)

        is_decode = row.kind == KINDS.index("decode")
        step = steps.decode_seconds(concurrency, context)
        tpot = np.where(is_decode, step, tpot)
        per_token = np.where(is_decode, step * row.decode.gpus / concurrency, per_token)
        # A prefill pool gives one token per prompt; its ranks work side by side.
        alone = pool.prefill_seconds(row.prompt, 0.0)
        per_token = np.where(row.kind == KINDS.index("prefill"), alone * row.prefill.gpus / dp, per_token)
        # All requests start together: their prompts fill whole steps, then all decode.
        started = steps.prompts_seconds(concurrency / dp * row.prompt, row.prompt)
        batch = (started + row.output * steps.decode_seconds(concurrency, context)) / (concurrency * row.output)
        per_token = np.where(row.kind == KINDS.index("batch"), batch * row.decode.gpus, per_token)
    return np.asarray(np.choose(row.metric.astype(int), [tpot, ttft, per_token]))


def _pools(row: ServedRow, steps: ServedSteps, pool: ServedSteps, first: Any, share: Any) -> tuple[Any, Any, Any]:
    """Return TPOT, mean TTFT and requests/s of a prefill pool that feeds a decode pool, in a closed loop."""
    output, context = row.output, row.prompt + 0.5 * row.output
    alone = pool.prefill_seconds(row.prompt, 0.0)
    servers = row.prefill_workers * row.prefill.attention_dp
    fitting = np.maximum(np.minimum(steps.max_running, steps.kv_tokens / context), 1.0) * row.workers
    decoding = np.minimum(row.concurrency, fitting)
    for _ in range(POOL_ROUNDS):
        tpot = steps.decode_seconds(np.maximum(decoding / row.workers, 1.0), context)
        most = np.minimum(servers / alone, fitting / ((output - 1.0) * tpot))
        free = row.concurrency / (first + alone + (output - 1.0) * tpot)
        rate = 1.0 / (1.0 / most**4 + 1.0 / free**4) ** 0.25
        decoding = 0.5 * (decoding + np.minimum(rate * (output - 1.0) * tpot, fitting))
    steady = np.maximum(row.concurrency / rate - (output - 1.0) * tpot, first + alone)
    burst = first + np.maximum(0.5 * (row.concurrency / servers + 1.0) * alone, alone)
    return tpot, (1.0 - share) * steady + share * np.maximum(burst, steady), rate


SERVING_STEP: Composition[ServedRow] = Composition(stack_rows, served_seconds, ENGINE_SPREAD)


@lru_cache(maxsize=4096)
def served_row(case: ServingCase) -> ServedRow:
    """Return the row of a case; of open layouts, the one that the priors prefer."""
    rows = [_row(case, layout) for layout in case.layouts]
    if len(rows) == 1:
        return rows[0]
    constants = np.exp(np.array(engine_prior_log(case.engine)))[:, None] * np.ones((1, len(rows)))
    return rows[int(np.argmin(served_seconds(stack_rows(rows), constants)))]


def _row(case: ServingCase, layout: ServedLayout) -> ServedRow:
    machine, load, is_own = case.machine, case.load, case.engine == OWN_ENGINE
    sizes = (STEP_TOKENS, MAX_RUNNING) if is_own else ()
    decode = serving_terms(case.shape, machine, layout, case.precision, *sizes, is_own=is_own)
    prefill = serving_terms(case.shape, machine, case.prefill, case.precision) if case.prefill else decode
    workers, prefill_workers = layout.replicas, case.prefill.replicas if case.prefill else layout.replicas
    context = load.prompt + 0.5 * load.output
    if "decode.workers" in case.open_fields:  # as many as hold the requests
        workers = max(1, math.ceil(load.concurrency * context / max(decode.kv_tokens, context)))
    if "prefill.workers" in case.open_fields:
        prefill_workers = max(1, math.ceil(load.concurrency / 256))
    return ServedRow(
        decode=decode,
        prefill=prefill,
        metric=METRICS.index(case.metric),
        kind=KINDS.index(load.kind),
        pooled=float(case.prefill is not None),
        workers=workers,
        prefill_workers=prefill_workers,
        prompt=load.prompt,
        output=max(load.output, 1.0),
        concurrency=load.concurrency,
        rate=load.rate,
        first_wave=load.first_wave,
        cached=load.cached,
        draft_tokens=load.draft_tokens,
        accepted_tokens=load.accepted_tokens,
    )


def serving_labels(case: ServingCase) -> dict[str, str]:
    """Return the labels of the effects that a case shares with others."""
    generation = catalog_gpu(case.gpu).generation.removesuffix("-ultra")
    labels = {
        "all": "all",
        "generation": generation,
        "engine": engine_label(case.engine, case.version),
        "version": version_label(case.engine, case.version),
        "engine-gpu": f"{engine_label(case.engine, case.version)} {case.gpu}",
        "engine-metric": f"{case.engine} {case.metric}",
    }
    if case.engine == OWN_ENGINE:  # measured under one protocol, with all settings known: its constants explain it
        return labels
    # Sources run one architecture under several names with other settings: an effect is one name's.
    model, source = architecture(case.shape), case.source
    group = f"{source}|{case.gpu}|{case.shape.name}|{case.engine}"
    labels |= {
        "model": model,
        "group": group,
        "group-metric": f"{group} {case.metric}",
        "source-metric": f"{source} {case.metric}",
        "version-model": f"{case.engine} {case.version} {model}" if case.version else "",
    }
    if case.metric == "ttft_seconds":
        labels |= {"ttft-model": f"{case.engine} {model}", "ttft-group": group}
    if case.metric == "tpot_seconds" and case.shape.mtp_layers and not case.load.draft_tokens:
        labels |= {"drafts-group": group, "drafts": ""}
    return labels


def fitted_serving_cases() -> tuple[ServingCase, ...]:
    return (*serving_corpus(), *own_serving_cases())


@lru_cache(maxsize=1)
def serving_corpus_fit() -> Fit[ServedRow]:
    """Return the fit to all shipped cases and those of Craton's own server."""
    return fit_serving(fitted_serving_cases())


def predict_served(fit: Fit[ServedRow], cases: Sequence[ServingCase]) -> list[Prediction]:
    """Predict the seconds of each case's metric; of a throughput, the seconds of a GPU per output token."""
    return fit.predict_rows([serving_fit_row(case) for case in cases])


def engine_label(engine: str, version: str) -> str:
    """TensorRT-LLM ran compiled TensorRT engines in C++ before version 1.0, and PyTorch since."""
    return "trtllm TensorRT" if engine == "trtllm" and re.match(r"0\.1\d", version) else engine


def version_label(engine: str, version: str) -> str:
    return f"{engine} {version}" if engine and version else ""


def serving_fit_row(case: ServingCase) -> FitRow[ServedRow]:
    measured = case.measured if case.metric != "tokens_per_second_per_gpu" else 1.0 / case.measured
    noise = SERVING_NOISE[case.metric] * (OPEN_LAYOUT_NOISE if case.open_fields else 1.0)
    noise *= OWN_NOISE if case.engine == OWN_ENGINE and case.load.kind != "open" else 1.0
    return FitRow(served_row(case), math.log(measured), serving_labels(case), engine_prior_log(case.engine), noise)


def fit_serving(cases: Sequence[ServingCase], start: Fit[ServedRow] | None = None) -> Fit[ServedRow]:
    """Fit the constants of all engines to these cases; `start`: a fit to almost the same cases."""
    return Fit(SERVING_STEP, [serving_fit_row(case) for case in cases], SERVING_LEVELS, SERVING_SCALES, start)
