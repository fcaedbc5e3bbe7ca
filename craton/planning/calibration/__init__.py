"""Software profiles: shipped ones, published runs they are fitted to, and a team's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.planning.calibration.cases import (
        GPU_NAMES,
        USUAL_NIC_GBPS,
        Case,
        CaseFileError,
        Skipped,
        UnrepresentableError,
        data_folder,
        load_cases,
        read_case_file,
        whole,
    )
    from craton.planning.calibration.fit_profile import (
        CalibrationError,
        LoggedRun,
        calibrate,
        calibrate_from,
        load_pins,
        load_runs,
    )
    from craton.planning.calibration.measured_steps import own_runs
    from craton.planning.calibration.profiles import (
        STACKS,
        UNKNOWN,
        check_software,
        find_profile,
        interval_factor,
        predict,
        profile_from_fit,
        save_profile,
        with_traits,
    )
    from craton.planning.calibration.published_rows import case_machine, corpus, corpus_fit, effect_labels, row_of
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
