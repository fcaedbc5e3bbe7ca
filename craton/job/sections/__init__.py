"""Sections of a job file: data, train, checkpoint, recover, serve, command, sweep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.job.sections.checkpoint import RESCUE, Checkpoint, TierPlace, place_of, rescue_place
    from craton.job.sections.command import (
        PLACEHOLDERS,
        ProcessesSpec,
        ProgressSection,
        Workdir,
        WorkdirSpec,
        check_placeholders,
        check_processes,
        named_launcher,
        processes_per_node,
    )
    from craton.job.sections.data import MIN_BPE_VOCABULARY, STANDARD_LIBRARY, Data, Function
    from craton.job.sections.recover import ChaosSpec, RecoverSection, faults_of
    from craton.job.sections.sweep import SweepEntry, SweepSection
    from craton.job.sections.train import (
        FaultPolicy,
        Float8Recipe,
        LearningRateSchedule,
        Lora,
        Train,
        Weights,
    )
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
