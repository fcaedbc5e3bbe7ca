"""Triton kernels, each with a plain PyTorch twin in `craton.ml.kernels`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.ml.kernels.triton.adamw import adamw_
    from craton.ml.kernels.triton.compile_ahead import compiling_ahead
    from craton.ml.kernels.triton.cross_entropy import log_probs_, scale_
    from craton.ml.kernels.triton.float8 import quantize, quantize_rows
    from craton.ml.kernels.triton.norm import AddNorm
    from craton.ml.kernels.triton.qk_norm import SplitNormAndRotate
    from craton.ml.kernels.triton.rope import SplitAndRotate
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
