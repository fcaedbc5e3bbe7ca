"""Benchmarks of `craton bench`: cases, scenario generators, load generator, scorers. No product package imports it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.bench.inference import (
        bench_inference,
        inference_json,
        inference_summary,
        is_inference_file,
        median_error,
    )
    from craton.bench.planner import HOLDOUT_KEYS, bench_json, bench_plan, summary
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
