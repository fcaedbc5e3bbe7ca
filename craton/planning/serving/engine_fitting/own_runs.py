"""Measurements of a reader's own server: what `craton bench serve --json` writes, beside the job file of the server.

`[{"job": "serve.yaml", "bench": "c16.json"}, …]`: a file holds one load, or the levels of a sweep. `bench` may also be
the document itself, and a row in the format of data/inference_results.json stands for itself.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from craton.infrastructure import Cluster, resolve_cluster
from craton.job import Job, load_job
from craton.planning.calibration import CaseFileError, read_case_file
from craton.planning.rates import machine_of
from craton.planning.serving.engine_fitting.calibrate import EngineCalibrationError
from craton.planning.serving.engine_fitting.cases import Metric, ServingCase, ServingLoad, is_serving_row
from craton.planning.serving.engine_fitting.cases import read_serving_rows as read_rows
from craton.planning.serving.layout import ServedLayout
from craton.planning.serving.profile import UNKNOWN_ENGINE, named_engine
from craton.planning.serving.terms import ServedPrecision, serving_terms

KEYS = ("job", "bench", "name")


def is_server_file(path: str | Path) -> bool:
    """Tell measurements of servers from logged training runs."""
    try:
        entries = _entries(path)
    except CaseFileError:
        return False  # the reader of training runs says what is wrong
    return bool(entries) and all(
        isinstance(entry, dict) and ("bench" in entry or is_serving_row(entry)) for entry in entries
    )


def load_server_measurements(path: str | Path, software: str) -> list[ServingCase]:
    """Return the cases of all measurements of this software; EngineCalibrationError names the entry that is wrong."""
    engine, version = named_engine(software)
    cases: list[ServingCase] = []
    for position, entry in enumerate(_entries(path), start=1):
        where = f"{path}: run {position}"
        if "bench" in entry:
            cases += _of_bench(entry, where, Path(path).parent, engine, version)
            continue
        read, skipped = read_rows([entry])
        if skipped:
            raise EngineCalibrationError(f"{where}: {skipped[0].reason}")
        if read[0].engine not in (engine, UNKNOWN_ENGINE):
            raise EngineCalibrationError(
                f"{where} is of {read[0].engine}, and the profile to start from (--software) is of {engine}; use one "
                "file per engine"
            )
        cases += [replace(case, engine=engine) for case in read]
    return cases


def _entries(path: str | Path) -> list[Any]:
    return read_case_file(path, ("runs", "cases"))[0]


def _of_bench(entry: dict[str, Any], where: str, folder: Path, engine: str, version: str) -> list[ServingCase]:
    unknown = [key for key in entry if key not in KEYS]
    if unknown:
        raise EngineCalibrationError(f"{where}: key {unknown[0]!r} is not known; allowed: {', '.join(KEYS)}")
    if "job" not in entry:
        raise EngineCalibrationError(f"{where}: key job is missing; give the job file of the server that was measured")
    job = load_job(folder / str(entry["job"]))
    if job.serve is None or job.model_shape is None:
        raise EngineCalibrationError(f"{where}: {job.name} does not serve a model of known shape")
    document = entry["bench"]
    if not isinstance(document, dict):
        file = folder / str(document)
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise EngineCalibrationError(f"{where}: bench {file}: cannot be read as JSON: {error}") from None
    name = str(entry.get("name") or entry["job"])
    levels = document.get("levels") if isinstance(document, dict) else None
    if not isinstance(levels, list) or not levels:
        raise EngineCalibrationError(f"{where}: bench is not what `craton bench serve --json` prints: no levels")
    cluster = resolve_cluster(job.cluster, job.price)
    cases: list[ServingCase] = []
    for number, level in enumerate(levels, start=1):
        try:
            cases += _of_level(level, job, cluster, f"{name} {level['load']}", engine, version)
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise EngineCalibrationError(f"{where}: bench level {number}: {type(error).__name__}: {error}") from None
    if not cases:
        raise EngineCalibrationError(f"{where}: no level of the bench has both a load that was kept up and answers")
    return cases


def _of_level(
    level: dict[str, Any], job: Job, cluster: Cluster, name: str, engine: str, version: str
) -> list[ServingCase]:
    """Return the cases of one load; an overloaded level of a sweep measures its queue and not the server."""
    assert job.serve is not None
    assert job.model_shape is not None
    summary = level["summary"]
    answered, rate, concurrency = summary["answered"], level["requests_per_second"], level["concurrency"]
    if level["trouble"] or not answered or not (rate or concurrency):
        return []
    prompt, output = summary["prompt_tokens"] / answered, summary["output_tokens"] / answered
    cached = min((summary.get("cached_tokens") or 0) / answered, prompt - 1.0)
    if rate:
        load = ServingLoad("open", prompt, output, rate=float(rate), cached=cached)
    else:
        wave = min(1.0, concurrency / summary["requests"])
        load = ServingLoad("closed", prompt, output, concurrency=float(concurrency), first_wave=wave, cached=cached)
    serve, machine = job.serve, machine_of(cluster)
    sizes = {name: getattr(job.layout, name) or 1 for name in ("tp", "pp", "ep")} if job.layout else {}
    layout = ServedLayout(**sizes, attention_dp=serve.attention_dp)
    kv = "fp8" if serve.kv_precision == "fp8" else "bf16"
    precision = ServedPrecision(serve.precision, kv)
    if not serving_terms(job.model_shape, machine, layout, precision).fits:
        raise ValueError(f"the weights of {job.model_shape.name} do not fit into {layout.gpus} GPUs")
    measured: dict[Metric, float] = {}
    for metric in ("ttft_seconds", "tpot_seconds"):
        if summary[metric]:
            measured[metric] = float(summary[metric]["mean"])
    if not rate:
        measured["tokens_per_second_per_gpu"] = summary["output_tokens_per_second"] / layout.gpus
    return [
        ServingCase(
            id=name,
            metric=metric,
            measured=value,
            source="own server",
            engine=engine,
            version=version,
            gpu=machine.gpu.name,
            nvlink_domain=machine.network.nvlink_domain,
            shape=job.model_shape,
            layouts=(layout,),
            prefill=None,
            precision=precision,
            load=load,
            own_machine=machine,
        )
        for metric, value in measured.items()
        if value > 0.0
    ]
