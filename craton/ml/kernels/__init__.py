"""Operations of a decoder: fused Triton kernels on CUDA, and plain PyTorch twins that tests compare them with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.ml.kernels.causal_attention import attention
    from craton.ml.kernels.context import gather_in_order
    from craton.ml.kernels.documents import ContextSlice, Documents
    from craton.ml.kernels.elementwise import add_norm, is_fused, split_and_rotate, swiglu, swiglu_backward
    from craton.ml.kernels.float8 import (
        GRADIENTS,
        VALUES,
        Float8Error,
        Quantized,
        Recipe,
        check_device,
        check_sizes,
        product,
        product_of_turned,
        product_with_transposed,
        quantize,
        quantize_rows,
    )
    from craton.ml.kernels.matmuls import gated_linears, gated_mlp, linear, linears, scatter_linear
    from craton.ml.kernels.recompute import ATTENTION_OPERATIONS, keeping
    from craton.ml.kernels.weight_gradients import LateGradients, put_off, weight_gradient
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
