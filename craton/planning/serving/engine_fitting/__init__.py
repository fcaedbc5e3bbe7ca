"""Constants of serving engines, fitted to published and own measurements of servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.planning.serving.engine_fitting.calibrate import (
        EngineCalibration,
        EngineCalibrationError,
        calibrate_engine,
    )
    from craton.planning.serving.engine_fitting.cases import (
        ServingCase,
        is_serving_row,
        load_serving_cases,
        own_serving_cases,
        read_serving_rows,
        serving_corpus,
        serving_corpus_path,
    )
    from craton.planning.serving.engine_fitting.fit import (
        fit_serving,
        fitted_serving_cases,
        predict_served,
        serving_corpus_fit,
    )
    from craton.planning.serving.engine_fitting.own_runs import is_server_file, load_server_measurements
    from craton.planning.serving.engine_fitting.shipped import shipped_profiles
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
