"""The section `serve:` of a job file: a server's settings, and the load and latency that plans are for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.job.sections.serving.load import LengthsSection, LoadSection, SloSection
    from craton.job.sections.serving.serve import (
        ACTIVATIONS,
        DEFAULT_LENGTH,
        NOT_OF_A_SERVER,
        OWN_PRECISIONS,
        PLANNED_ENGINES,
        PLANNED_LAYOUT,
        Serve,
    )
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
