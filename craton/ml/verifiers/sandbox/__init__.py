"""Confined processes: no network, no secrets, no files but libraries, limits on everything; torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.ml.verifiers.sandbox.confinement import Confinement, Isolation
    from craton.ml.verifiers.sandbox.isolation import (
        IsolationReport,
        find_isolation,
        require_isolation,
        try_isolation,
    )
    from craton.ml.verifiers.sandbox.launch import ConfinedProcess, launch
    from craton.ml.verifiers.sandbox.limits import ProcessLimits
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
