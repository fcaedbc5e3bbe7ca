"""The user's input: job file, cluster file, model shape, layout algebra; frozen and complete, errors with lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.job.dump import dump_job
    from craton.job.errors import ContentError, FaultError, JobError, LayoutError, ModelError, SchemaError
    from craton.job.faults import RANDOM_KINDS, InjectedFault, check_fault, check_member, parse_fault, random_faults
    from craton.job.here import check_here, check_trackers
    from craton.job.jobfile import TRAINING_KINDS, TUNING_KINDS, Job
    from craton.job.loader import load_job, make_job, parse_job
    from craton.job.run_section import Placement
    from craton.job.serving import check_load, check_precisions, is_planned_only
    from craton.job.sharing import sharing_problem
    from craton.job.suite_files import files_of_suites, functions_of_suites
    from craton.job.summary import check_job, checked_layout
    from craton.job.sweep import SweptJob, sweep_jobs
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
