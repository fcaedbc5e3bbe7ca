"""Precisions of a planned server: of weights, of the activations that they are multiplied with, of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

from craton.infrastructure import Gpu
from craton.job import Job, is_planned_only
from craton.job.model import ModelShape
from craton.planning.rates import MachineRates
from craton.planning.serving.terms import ServedPrecision
from craton.planning.setting import PlanError

# 8- and 4-bit matmuls: (precision of the activations, the rate in the catalog that a GPU needs for it).
NARROW = {"fp8": ("fp8", "fp8"), "fp8_block": ("fp8", "fp8"), "nvfp4": ("nvfp4", "fp4"), "mxfp4": ("fp8", "fp4")}


@dataclass(frozen=True)
class ServedFormats:
    """What a job's precisions are on one kind of GPU."""

    stored: ServedPrecision  # of weights by part, and of the KV cache
    activations: str

    @classmethod
    def of(cls, job: Job, shape: ModelShape, gpu: Gpu) -> ServedFormats:
        """Resolve `auto`. PlanError if the GPU lacks what the job asks for."""
        serve = job.serve
        assert serve is not None
        activations, rate = NARROW.get(serve.precision, ("bf16", "bf16"))
        if not gpu.flops.get(rate) or serve.activation_precision == "bf16":
            activations = "bf16"
        if serve.precision == "fp32":
            activations = "fp32"
        wanted = serve.activation_precision
        if wanted not in ("auto", activations):
            raise PlanError(
                f"{job.where('serve', 'activation_precision')}{gpu.name} has no {rate} matmuls for weights in "
                f"{serve.precision} with activations in {wanted}; write activation_precision bf16 (weight-only), or "
                "auto"
            )
        kv = "fp8" if serve.kv_precision == "fp8" else "fp32" if serve.precision == "fp32" else "bf16"
        if serve.precision == "int4" and not is_planned_only(job.software):  # in 4 bits are linear layers only
            return cls(ServedPrecision("int4", kv, experts="bf16"), activations)
        return cls(_stored(serve.precision, kv, shape), activations)

    def machine(self, machine: MachineRates) -> MachineRates:
        """Return the machine with matmuls no faster than those of the activations: narrow weights are widened."""
        if self.activations != "bf16":
            return machine
        rates, most = machine.rates, machine.rates.matrix_flops["bf16"]
        capped = {name: min(flops, most) for name, flops in rates.matrix_flops.items()}
        return replace(machine, rates=replace(rates, matrix_flops=capped))


def _stored(weights: str, kv: str, shape: ModelShape) -> ServedPrecision:
    """Published 4-bit checkpoints keep parts in bf16: MXFP4 quantizes experts only, NVFP4 all but latent attention."""
    if weights == "mxfp4" and shape.is_moe:
        return ServedPrecision("bf16", kv, experts=weights, attention="bf16")
    if weights in ("nvfp4", "mxfp4") and shape.mla is not None:
        return ServedPrecision(weights, kv, attention="bf16")
    return ServedPrecision(weights, kv)
