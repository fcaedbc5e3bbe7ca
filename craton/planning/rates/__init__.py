"""How fast hardware is for a given shape: matmuls, attention, collectives, pairs of nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.planning.rates.collectives import (
        Group,
        Network,
        all_gather_seconds,
        all_reduce_seconds,
        all_to_all_seconds,
        point_to_point_seconds,
        reduce_scatter_seconds,
    )
    from craton.planning.rates.cpu import (
        cpu_attention_seconds,
        cpu_exponential_seconds,
        cpu_matmul_seconds,
        cpu_of,
        cpu_pass_seconds,
    )
    from craton.planning.rates.kernels import (
        OUTPUT_BYTES,
        GpuRates,
        attention_seconds,
        flops_per_score,
        gemm_seconds,
        grouped_gemm_seconds,
    )
    from craton.planning.rates.machine_rates import (
        MachineRates,
        machine,
        machine_of,
        machine_of_ranks,
        pair_bytes_per_second,
        rates_of,
    )
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
