"""What learns: models, kernels, data and training. The only package that needs torch; importing this name does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.ml.precisions import TRAINED_PRECISIONS
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
