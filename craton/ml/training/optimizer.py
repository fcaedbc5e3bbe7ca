"""The optimizer: AdamW (arXiv:1711.05101) over any mix of whole and sharded parameters, and its learning rate, without
host synchronization.

Mixed precision keeps weights in one of two ways. "fp32": every parameter has an fp32 master, its own storage if it is
fp32, a copy beside it if it is bf16. "bf16": weights and both optimizer states are bf16 with stochastic rounding, so
updates smaller than the spacing of bf16 take effect with the right probability. Clipping, and the skip of a step with a
non-finite gradient, happen on the device.

The learning rate is a pure function of the step number, so a resumed run needs no state for it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from craton.errors import CratonError
from craton.job import Job
from craton.job.sections import LearningRateSchedule
from craton.ml.collectives import Peers, local

Weights = Literal["fp32", "bf16"]
DECAY_SHARE = 0.2  # of all steps, at the end of warmup-stable-decay (arXiv:2404.06395 finds 10% enough, 20% safe)


class ScheduleError(CratonError):
    """The job does not say how long it trains."""


@dataclass(frozen=True)
class Schedule:
    """The learning rate: linear warm-up to `peak`, then down to `final` at the last step, with the given `shape`."""

    shape: LearningRateSchedule
    steps: int
    warmup_steps: int
    peak: float
    final: float

    @classmethod
    def of(cls, job: Job) -> Schedule:
        assert job.train is not None, f"kind {job.kind} does not train"
        if job.steps is None:
            raise ScheduleError(f"{job.where('train')}train has neither steps nor tokens; set train.steps")
        return cls(job.train.schedule, job.steps, job.warmup_steps or 0, job.learning_rate, job.final_learning_rate)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step; the first step is 1."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.shape == "constant":
            return self.peak
        if self.shape == "wsd":
            decay_steps = max(1, round(DECAY_SHARE * self.steps))
            return self._between(1 - max(0, step - (self.steps - decay_steps)) / decay_steps)
        left = 1 - (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        if self.shape == "cosine":
            left = 0.5 * (1 - math.cos(math.pi * left))
        return self._between(left)

    def _between(self, share: float) -> float:
        return self.final + (self.peak - self.final) * min(1.0, max(0.0, share))


class AdamW:
    """Updates named parameters. Parameters of one dimension (norms, biases) have no weight decay."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        betas: tuple[float, float] = (0.9, 0.95),
        epsilon: float = 1e-8,
        weight_decay: float = 0.1,
        weights: Weights = "fp32",
        seed: int = 0,
        pipeline: Peers | None = None,
        copies: Collection[str] = (),
    ) -> None:
        """`pipeline`: the ranks of the other stages; `copies`: parameters that another stage counts."""
        self._pipeline, self._copies = pipeline, frozenset(copies)
        everything = dict(parameters)
        self._device = next(iter(everything.values())).device  # a pipeline stage may have nothing to train
        self.parameters = {name: parameter for name, parameter in everything.items() if parameter.requires_grad}
        self.betas, self.epsilon, self.weight_decay, self.weights, self.seed = (
            betas,
            epsilon,
            weight_decay,
            weights,
            seed,
        )
        self.steps = 0
        self.rank_gradient_norm = torch.full((), float("nan"), dtype=torch.float32, device=self._device)
        self._sums: dict[str, Tensor] = {}  # fp32 gradient sums of bf16 parameters over the micro-batches so far
        self._is_summed = False  # `_sums` holds the gradients of the whole step
        state_dtype = torch.float32 if weights == "fp32" else torch.bfloat16
        self.average = {name: torch.zeros_like(p, dtype=state_dtype) for name, p in self.parameters.items()}
        self.square = {name: torch.zeros_like(p, dtype=state_dtype) for name, p in self.parameters.items()}
        self.master = {
            name: parameter.detach().to(torch.float32, copy=True)
            for name, parameter in self.parameters.items()
            if weights == "fp32" and parameter.dtype != torch.float32
        }

    @torch.no_grad()
    def accumulate(self) -> None:
        """Gradient accumulation between micro-batches: with fp32 masters, sum the gradients of bf16 parameters in fp32,
        so that small ones are not rounded away."""
        for name in self.master:
            parameter = self.parameters[name]
            gradient = _gradient(parameter)
            if name in self._sums:
                self._sums[name] += gradient
            else:
                self._sums[name] = gradient.float()
            parameter.grad = None

    def new_sums(self) -> dict[str, Tensor]:
        """Return zeros to sum gradients in, as precise as `accumulate` sums them."""
        return {
            name: torch.zeros_like(parameter, dtype=torch.float32 if name in self.master else parameter.dtype)
            for name, parameter in self.parameters.items()
        }

    @torch.no_grad()
    def move_gradients_into(self, sums: Mapping[str, Tensor]) -> None:
        """Add the gradients of a micro-batch to the sums, and drop them."""
        gradients = [_gradient(self.parameters[name]) for name in sums]
        torch._foreach_add_(list(sums.values()), gradients)
        for name in sums:
            self.parameters[name].grad = None

    def use_sums(self, sums: Mapping[str, Tensor]) -> None:
        """Take these sums as the gradients of the step."""
        self._sums, self._is_summed = dict(sums), True

    def gradient_norm(self) -> Tensor:
        """Return the norm of all gradients on all ranks, fp32, on the device. Sets `rank_gradient_norm` for this rank's
        part."""
        gradients = [self._gradient(name) for name in self.parameters if name not in self._copies]
        squares: dict[object, list[Tensor]] = {}
        locals_ = _norms([local(gradient) for gradient in gradients])
        for gradient, norm in zip(gradients, locals_, strict=True):
            squares.setdefault(_shard_groups(gradient), []).append(norm)
        total = torch.zeros((), dtype=torch.float32, device=self._device)
        own = torch.zeros_like(total)
        for groups, norms in squares.items():
            part = torch.stack(norms).square().sum()
            own += part
            for group in groups:  # type: ignore[attr-defined]
                torch.distributed.all_reduce(part, group=group)
            total += part
        if self._pipeline is not None:
            total = self._pipeline.sum(total)
        self.rank_gradient_norm = own.sqrt()
        return total.sqrt()

    @torch.no_grad()
    def step(self, learning_rate: float, clip: float = 1.0, finite: Tensor | None = None) -> Tensor:
        """Run one update; return the gradient norm before clipping (NaN if it was not computed).

        With `clip` 0 no norm is computed, and `finite` (a flag on the device, such as whether the loss is finite) alone
        decides whether the step counts.
        """
        self.steps += 1
        if self._sums and not self._is_summed:
            self.accumulate()
        norm = self.gradient_norm() if clip else None
        control = self._control(norm, clip, finite)
        if control.is_cuda:
            for name, parameter in self.parameters.items():
                self._update(name, parameter, learning_rate, control)
        else:
            self._update_on_cpu(learning_rate, control)
        return torch.full((), float("nan"), device=control.device) if norm is None else norm

    def zero_grad(self) -> None:
        self._sums, self._is_summed = {}, False
        for parameter in self.parameters.values():
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """Return every tensor of the optimizer state, to be saved and filled in place."""
        return {
            **{f"exp_avg.{name}": tensor for name, tensor in self.average.items()},
            **{f"exp_avg_sq.{name}": tensor for name, tensor in self.square.items()},
            **{f"master.{name}": tensor for name, tensor in self.master.items()},
        }

    def load(self, state: Mapping[str, Tensor], steps: int) -> None:
        """Load a state of the same names, and its number of updates."""
        for name, tensor in self.state().items():
            if tensor is not state[name]:
                tensor.copy_(state[name])
        self.loaded(steps)

    @torch.no_grad()
    def loaded(self, steps: int) -> None:
        """Call after the tensors were filled in place: casts the masters into the parameters again."""
        self.steps = steps
        for name, master in self.master.items():
            self.parameters[name].copy_(master)

    def _control(self, norm: Tensor | None, clip: float, finite: Tensor | None) -> Tensor:
        """Return [gradient multiplier, 1 if the step counts else 0], on the device."""
        if norm is None:
            one = torch.ones((), dtype=torch.float32, device=self._device)
            return torch.stack((one, one if finite is None else finite.to(torch.float32)))
        good = norm.isfinite() if finite is None else norm.isfinite() & finite
        scale = (clip / (norm + 1e-6)).clamp(max=1.0).nan_to_num(0.0)
        return torch.stack((scale, good.to(torch.float32)))

    def _update(self, name: str, parameter: Tensor, learning_rate: float, control: Tensor) -> None:
        from craton.ml.kernels.triton import adamw_

        weight = local(parameter)
        if weight.numel() == 0:
            return
        master = self.master.get(name)
        adamw_(
            weight,
            local(self._gradient(name)).contiguous(),
            local(self.average[name]),
            local(self.square[name]),
            None if master is None else local(master),
            control,
            learning_rate,
            self._decay(parameter),
            self.betas,
            self.epsilon,
            self.steps,
            seed=self._rounding_seed(name),
            stochastic=self.weights == "bf16" and weight.dtype == torch.bfloat16,
        )

    def _gradient(self, name: str) -> Tensor:
        return self._sums[name] if name in self._sums else _gradient(self.parameters[name])

    def _rounding_seed(self, name: str) -> int:
        """Derive a seed from seed, step and parameter, so that a repeated step rounds the same way."""
        return (self.seed * 0x9E3779B1 + self.steps * 0x85EBCA77 + zlib.crc32(name.encode())) & 0x7FFFFFFF

    def _decay(self, parameter: Tensor) -> float:
        return self.weight_decay if parameter.ndim > 1 else 0.0

    def _update_on_cpu(self, learning_rate: float, control: Tensor) -> None:
        """PyTorch's own fused update, in fp32; bf16 state goes through fp32 copies."""
        scale, good = control.tolist()
        if not good:
            return
        for decay in {self._decay(parameter) for parameter in self.parameters.values()}:
            names = [name for name, parameter in self.parameters.items() if self._decay(parameter) == decay]
            kept = [
                [local(self.master.get(name, self.parameters[name])) for name in names],
                [local(self.average[name]) for name in names],
                [local(self.square[name]) for name in names],
            ]
            full = [[tensor.float() for tensor in tensors] for tensors in kept]
            gradients = [local(self._gradient(name)).float() for name in names]
            torch._fused_adamw_(
                full[0],
                gradients,
                full[1],
                full[2],
                [],
                [torch.tensor(float(self.steps))] * len(names),
                lr=learning_rate,
                beta1=self.betas[0],
                beta2=self.betas[1],
                weight_decay=decay,
                eps=self.epsilon,
                amsgrad=False,
                maximize=False,
                grad_scale=None if scale == 1.0 else torch.tensor(1.0 / scale),
            )
            for position, name in enumerate(names):
                generator = torch.Generator().manual_seed(self._rounding_seed(name))
                for tensors, values in zip(kept, full, strict=True):
                    if tensors[position].dtype == torch.bfloat16:
                        tensors[position].copy_(round_stochastically(values[position], generator))
        for name, master in self.master.items():
            local(self.parameters[name]).copy_(local(master))


def round_stochastically(value: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """fp32 → bf16, rounded up with the probability of the truncated part: add 16 random bits below the last kept
    bit."""
    bits = torch.randint(0, 1 << 16, value.shape, dtype=torch.int32, device=value.device, generator=generator)
    raw = (value.view(torch.int32) + bits) & -65536
    return raw.view(torch.float32).to(torch.bfloat16)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "a parameter has no gradient; freeze it, or use it in the loss"
    return parameter.grad


def _norms(tensors: list[Tensor]) -> Sequence[Tensor]:
    return torch._foreach_norm(tensors, dtype=torch.float32) if tensors else ()


def _shard_groups(gradient: Tensor) -> tuple[object, ...]:
    """Return the process groups over which a gradient is sharded; copies count once."""
    if not isinstance(gradient, DTensor):
        return ()
    mesh = gradient.device_mesh
    # not `is_shard`: FSDP sharding after tensor parallelism is a different placement class
    cut = (axis for axis, placement in enumerate(gradient.placements) if not placement.is_replicate())
    return tuple(mesh.get_group(axis) for axis in cut)
