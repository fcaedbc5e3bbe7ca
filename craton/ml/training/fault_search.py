"""Where a loss or a gradient that is not finite began: in which sample, array, parameter or module.

Nothing here runs on good steps. After a bad one, all ranks look at the batches of that step once more: at the numbers
of the data, at the weights, at the outputs of all modules in a forward pass, and at the gradients. All ranks take the
same decisions, since every pass is a collective; the first finding of all ranks counts. The optimizer skipped the bad
step, so the weights are at most one good step newer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from craton.ml.collectives import local
from craton.ml.training.batch import Batch
from craton.ml.training.objectives import Objective, Readings
from craton.ml.training.parallel import Pipeline, Ranks

MAX_SEARCHES = 3  # in one generation: the first bad steps say it all
MAX_KEPT_BYTES = 64 << 20  # of the batches of a step, kept until its numbers have arrived
TEXT_BYTES = 240
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


@dataclass(frozen=True)
class Origin:
    """The first number that is not finite."""

    origin: str  # data, weights, activations, objective, gradients
    part: str  # the array of the data, the parameter, the module or the objective
    sample: int | None = None
    rank: int = 0  # that found it
    is_alone: bool = False  # the only rank that found it, although others do the same work on other samples

    def fields(self) -> dict[str, Any]:
        """Return the fields of a `bad_step` event."""
        sample = {} if self.sample is None else {"sample": self.sample}
        alone = {"found_alone": True} if self.is_alone else {}
        return {"origin": self.origin, "part": self.part, **sample, "found_by": self.rank, **alone}

    def __str__(self) -> str:
        sample = "" if self.sample is None else f" of sample {self.sample}"
        return {
            "data": f"{self.part}{sample} is not finite",
            "weights": f"the weights of {self.part} are not finite",
            "activations": f"the output of {self.part}{sample and ' for' + sample[3:]} is not finite",
            "objective": f"the objective {self.part} is not finite",
            "gradients": f"the gradient of {self.part} is not finite",
        }[self.origin]


class FaultSearch:
    """Created by every rank; all ranks call `find` for the same steps."""

    def __init__(self, model: nn.Module, objective: Objective, ranks: Ranks, pipeline: Pipeline | None) -> None:
        self._model, self._objective, self._ranks, self._pipeline = model, objective, ranks, pipeline
        self._searches = 0

    def kept(self, batches: Sequence[Batch]) -> Sequence[Batch] | None:
        """Return the batches if they are small enough to be kept for a step."""
        size = sum(tensor.nbytes for batch in batches for _, tensor in _numbers(batch)) + sum(
            batch.tokens.nbytes + batch.labels.nbytes + batch.positions.nbytes for batch in batches
        )
        return batches if size <= MAX_KEPT_BYTES else None

    def find(
        self,
        batches: Sequence[Batch] | None,
        first_sample: int,
        parameters: dict[str, Tensor],
        backward: Callable[[Sequence[Batch]], None],
    ) -> Origin | None:
        """Return where the step of these batches went bad; None if that cannot be found. `first_sample` is this rank's
        first one; `backward` computes the gradients of `parameters`."""
        if self._searches >= MAX_SEARCHES:
            return None
        self._searches += 1
        hit = None if batches is None else _bad_data(batches, first_sample)
        hit = hit or _bad_weights(self._model)
        if (origin := self._first(hit)) is not None:
            return origin
        if not self._all_have(batches) or batches is None:
            return None
        if (origin := self._first(self._forward(batches, first_sample))) is not None:
            return origin
        backward(batches)
        return self._first(_bad_gradients(parameters))

    @torch.no_grad()
    def _forward(self, batches: Sequence[Batch], first_sample: int) -> _Hit | None:
        """Run the forward pass of every micro-batch with a hook on every module."""
        watch = _Outputs(self._model, len(batches[0].tokens), counts_calls=self._pipeline is not None)
        was_training = self._model.training
        self._model.eval()
        hit: _Hit | None = None
        with watch.hooked():
            if self._pipeline is not None:
                one = torch.ones((), device=self._ranks.device)
                size = self._ranks.layout.pp
                losses = [self._pipeline.forward(batches[at : at + size], one) for at in range(0, len(batches), size)]
                if not all(bool(sums["loss"].isfinite()) for sums in losses):
                    hit = _Hit(3, self._head(), None)
            else:
                for number, batch in enumerate(batches):
                    watch.micro_batch = number
                    found = self._of_head(batch, first_sample + number * len(batch.tokens))
                    hit = hit or found
        self._model.train(was_training)
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return watch.first(first_sample) or hit

    def _head(self) -> str:
        is_own = self._objective.coefficients is not None
        return "activations:the output head" if is_own else f"objective:{self._objective.name}"

    def _of_head(self, batch: Batch, first_sample: int) -> _Hit | None:
        """Return whether the log-probabilities of a micro-batch are bad, and of which sample, or only the objective."""
        hidden = self._model(batch.tokens, batch.positions, batch.documents)
        read = Readings.of(self._model, hidden, batch, self._objective)
        bad = torch.stack([~values.isfinite() for values in (read.log_probs, read.scores) if values is not None])
        rows = (bad & (batch.weight != 0)).any(dim=2).any(dim=0)
        if bool(rows.any()):
            return _Hit(3, "activations:the output head", first_sample + int(rows.int().argmax()))
        if self._objective.coefficients is None:
            total, _ = self._objective.function(*read.arguments(batch))
            if not bool(total.isfinite()):
                return _Hit(3, self._head(), None)
        return None

    def _all_have(self, batches: Sequence[Batch] | None) -> bool:
        missing = torch.full((), float(batches is None), dtype=torch.float64, device=self._ranks.device)
        return not bool(self._ranks.sum(missing))

    def _first(self, hit: _Hit | None) -> Origin | None:
        """Return the first finding of all ranks: of the lowest kind, the earliest stage and the lowest sample. For
        gradients the last stage, since they go backwards."""
        ranks = self._ranks
        table = torch.zeros((ranks.world, 3), dtype=torch.float64)
        if hit is not None:
            stage = ranks.place["pp"] if hit.kind < 4 else -ranks.place["pp"]
            table[ranks.rank] = torch.tensor([hit.kind, stage, -1 if hit.sample is None else hit.sample])
        rows = ranks.sum(table.to(ranks.device)).tolist()
        found = [(kind, stage, sample < 0, sample, rank) for rank, (kind, stage, sample) in enumerate(rows) if kind]
        if not found:
            return None
        _, _, _, sample, rank = min(found)
        text = torch.zeros(TEXT_BYTES, dtype=torch.float64)
        if rank == ranks.rank and hit is not None:
            letters = hit.text.encode()[:TEXT_BYTES]
            text[: len(letters)] = torch.tensor(list(letters), dtype=torch.float64)
        shared = bytes(int(letter) for letter in ranks.sum(text.to(ranks.device)).tolist() if letter)
        origin, _, part = shared.decode(errors="replace").partition(":")
        layout = ranks.layout
        is_alone = len(found) == 1 and ranks.world > 1 and layout.pp == layout.cp == layout.tp == 1
        return Origin(origin, part, None if sample < 0 else int(sample), rank, is_alone)


@dataclass(frozen=True)
class _Hit:
    kind: int  # 1 data, 2 weights, 3 forward pass, 4 gradients
    text: str  # origin:part
    sample: int | None


class _Outputs:
    """Notes which outputs of modules are not finite, without waiting for the device."""

    def __init__(self, model: nn.Module, rows: int, counts_calls: bool) -> None:
        self.micro_batch = 0
        self._model, self._rows, self._counts_calls = model, rows, counts_calls
        self._calls: dict[str, int] = {}
        self._noted: list[tuple[str, int, Tensor]] = []  # module, micro-batch, bad rows (or one flag)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        handles = [
            module.register_forward_hook(self._hook(name)) for name, module in self._model.named_modules() if name
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def first(self, first_sample: int) -> _Hit | None:
        """Return the first module with a bad output, and the sample, from the first output that has rows."""
        noted = [(name, number, flags.tolist()) for name, number, flags in self._noted]
        bad = next(((name, number) for name, number, flags in noted if any(flags)), None)
        if bad is None:
            return None
        name, micro_batch = bad
        rows = next((f for _, number, f in noted if number == micro_batch and len(f) == self._rows and any(f)), None)
        sample = None if rows is None else first_sample + micro_batch * self._rows + rows.index(True)
        return _Hit(3, f"activations:{name}", sample)

    def _hook(self, name: str) -> Callable[..., None]:
        clean = _clean(name)

        def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) and output else output
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                return
            number = self.micro_batch
            if self._counts_calls:
                number = self._calls.get(clean, 0)
                self._calls[clean] = number + 1
            bad = ~local(tensor).isfinite()
            has_rows = bad.ndim == 3 and bad.shape[0] == self._rows
            self._noted.append((clean, number, bad.flatten(1).any(dim=1) if has_rows else bad.any().view(1)))

        return note


def _bad_data(batches: Sequence[Batch], first_sample: int) -> _Hit | None:
    sample = first_sample
    for batch in batches:
        for name, tensor in _numbers(batch):
            rows = (~tensor.isfinite()).flatten(1).any(dim=1) if tensor.ndim > 1 else ~tensor.isfinite()
            if bool(rows.any()):
                return _Hit(1, f"data:{name}", sample + int(rows.int().argmax()))
        sample += len(batch.tokens)
    return None


def _numbers(batch: Batch) -> list[tuple[str, Tensor]]:
    return [
        (name, tensor)
        for name, tensor in (("weight", batch.weight), *batch.extra.items())
        if tensor.is_floating_point() and tensor.ndim > 0
    ]


def _bad_weights(model: nn.Module) -> _Hit | None:
    name = _first_bad([*model.named_parameters(), *model.named_buffers()])
    return None if name is None else _Hit(2, f"weights:{name}", None)


def _bad_gradients(parameters: dict[str, Tensor]) -> _Hit | None:
    """Return the last parameter of the forward pass with a bad gradient: the backward pass reached it first."""
    gradients = [(name, parameter.grad) for name, parameter in parameters.items() if parameter.grad is not None]
    name = _first_bad(list(reversed(gradients)))
    return None if name is None else _Hit(4, f"gradients:{name}", None)


def _first_bad(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    names, flags = [], []
    for name, tensor in tensors:
        part = local(tensor)
        if part.is_floating_point() and part.numel():
            names.append(_clean(name))
            flags.append((~part.isfinite()).any())
    bad = torch.stack(flags).tolist() if flags else []
    return next((name for name, is_bad in zip(names, bad, strict=True) if is_bad), None)


def _clean(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
