"""Models, kernels, data, training and serving: the only package that needs torch, and importing it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.ml.functions import search_folder
    from craton.ml.precisions import TRAINED_PRECISIONS
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
