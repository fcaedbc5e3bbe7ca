"""Operations of serving without gradients: paged KV cache, skinny matmuls, sampling, adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.ml.kernels.reference import Norms
    from craton.ml.kernels.sampling_hash import MIN_TEMPERATURE
    from craton.ml.kernels.serving.adapters import (
        SlotsOfTokens,
        adapted_skinny_gated,
        adapted_skinny_linear,
        add_adapters,
    )
    from craton.ml.kernels.serving.int4 import (
        MIDDLE_CODE,
        Int4Weight,
        int4_gated,
        int4_group,
        int4_linear,
        num_int4_words,
        pack_int4,
        quantize_int4,
    )
    from craton.ml.kernels.serving.kept import choose_kept, truncate
    from craton.ml.kernels.serving.paged import (
        FEW_ROWS,
        Past,
        choose,
        decode_attention,
        gumbel,
        plain_decode_attention,
        plain_prefill_attention,
        prefill_attention,
        skinny_gated,
        skinny_linear,
        store,
        store_latents,
        store_rotated,
    )
    from craton.ml.kernels.serving.shared_prefix import plain_shared_decode_attention, shared_decode_attention
    from craton.ml.kernels.shared_prefixes import SharedPrefixes
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
