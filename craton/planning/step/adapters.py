"""Low-rank adapters (LoRA): their matmuls and transfers in a layer, and the trained share of a model.

Every matmul of a layer except router and experts has one (craton/ml/training/lora.py): a matmul down to the rank and
one up again. Where tensor parallelism shards the layer's own matmul it shards one of the two, and the tensor between
them is gathered or summed.
"""

from __future__ import annotations

from functools import lru_cache

from craton.job.layout import Layout
from craton.job.model import ModelShape
from craton.planning.rates import OUTPUT_BYTES
from craton.planning.software import Traits
from craton.planning.step.operations import Operations, Product, Transfer, Weight, layer_weights


@lru_cache(maxsize=1024)
def adapter_weights(weights: tuple[Weight, ...], rank: int) -> tuple[tuple[Weight, Weight], ...]:
    """Return (narrow, wide) of every adapter of a layer with these weights."""
    adapted = [weight for weight in weights if weight.columns > 1.0 and not (weight.stacked or weight.is_router)]
    return tuple(
        (
            Weight(rank, item.columns, is_partial=not item.cuts_columns),
            Weight(item.rows, rank, is_partial=item.is_partial or item.cuts_columns),
        )
        for item in adapted
    )


def adapter_operations(
    shape: ModelShape, layout: Layout, sequence: int, traits: Traits, rank: int, *, moe: bool
) -> Operations:
    """Return the matmuls and transfers of adapters in one layer for one micro-batch."""
    tokens = layout.micro_batch * sequence / layout.cp
    own_tokens = tokens / layout.tp if traits.sequence_parallel else tokens
    products: list[Product] = []
    forward: list[Transfer] = []
    backward: list[Transfer] = []
    between = OUTPUT_BYTES[layout.precision] * tokens * rank
    for narrow, wide in adapter_weights(layer_weights(shape, layout.tp, layout.ep, moe=moe), rank):
        products.append(Product(own_tokens if narrow.is_partial else tokens, rank, narrow.columns))
        products.append(Product(own_tokens if wide.is_partial else tokens, wide.rows, rank))
        if layout.tp > 1 and traits.sequence_parallel and narrow.is_partial != wide.is_partial:
            gather, scatter = (Transfer(operation, "tp", between) for operation in ("all_gather", "reduce_scatter"))
            forward.append(gather if narrow.is_partial else scatter)
            backward.append(scatter if narrow.is_partial else gather)
    return Operations(tuple(products), (), (), (), (), tuple(forward), tuple(backward))


@lru_cache(maxsize=1024)
def adapter_parameters(shape: ModelShape, rank: int) -> float:
    """Return the adapter parameters of the whole model; `rank` 0: none."""
    dense = shape.dense_layers if shape.is_moe else shape.layers
    return sum(
        count * sum(item.size for pair in adapter_weights(layer_weights(shape, 1, 1, moe=moe), rank) for item in pair)
        for moe, count in ((False, dense), (True, shape.layers - dense))
        if count
    )


def trained_share(shape: ModelShape, rank: int) -> float:
    """Return trained parameters over the model's parameters; `rank` 0: all of them are trained."""
    return adapter_parameters(shape, rank) / shape.parameters if rank else 1.0
