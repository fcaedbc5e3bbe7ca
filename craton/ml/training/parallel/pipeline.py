"""Pipeline parallelism: every rank runs its chunks of the model in schedule order.

One tensor passes between stages: forward the residual stream, backward its gradient. A lane is a process group that on
each rank carries only sends to one neighbour or only receives from one, in the same order at both ends (see
`schedules`). However a backend queues a group's messages, no two can wait for each other. Connections are opened before
the first step. Sends do not wait; receives are posted one action ahead.

FSDP2 gathers the weights of a chunk for its first micro-batch and keeps them. Gradients are summed whole and reduced
once, block by block, in the chunk's last backward pass. For zero-bubble that is its last round of weight gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.fsdp import FSDPModule

from craton.job.layout import Action, forward_actions, lane_of, schedule_actions
from craton.ml.collectives import Peers, local
from craton.ml.kernels import LateGradients, put_off
from craton.ml.models import Decoder
from craton.ml.training.batch import Batch
from craton.ml.training.objectives import Objective, hidden_loss
from craton.ml.training.parallel.ranks import Ranks

# Actions, including the current one. A first pass receives nothing ahead: it loads kernels, for which CUDA waits until
# all kernels of the process have ended, and a receive ends only when another rank sends.
RECEIVES_AHEAD, FIRST_RECEIVES_AHEAD = 2, 1


@dataclass
class _Message:
    """A tensor in transit."""

    work: Any
    tensor: Tensor
    lane: Peers

    def wait(self) -> Tensor:
        with self.lane.waiting():
            self.work.wait()
        return self.tensor


@dataclass
class _Passed:
    """What a forward pass keeps for its backward pass."""

    inputs: Tensor
    output: GradientEdge | None  # the tensor itself is no longer needed; None if nothing is trained


@dataclass
class _Step:
    """The state of a step in progress."""

    batches: Sequence[Batch]
    count: Tensor
    totals: dict[str, Tensor] = field(default_factory=dict)
    received: dict[Action, _Message] = field(default_factory=dict)
    sent: list[_Message] = field(default_factory=list)
    passed: dict[tuple[int, int], _Passed] = field(default_factory=dict)  # by chunk and micro-batch
    late: dict[tuple[int, int], LateGradients] = field(default_factory=dict)


class Pipeline:
    """This rank's part of the pipeline. All ranks call the same methods in the same order."""

    def __init__(self, model: nn.Module, ranks: Ranks, objective: Objective) -> None:
        assert isinstance(model, Decoder)
        assert ranks.pipeline is not None
        self.model, self.ranks, self.objective = model, ranks, objective
        self.rank, self.pp, self.vpp = ranks.pipeline.rank, ranks.layout.pp, ranks.layout.vpp
        self._peers = ranks.pipeline
        self._dtype = torch.float32 if ranks.layout.precision == "fp32" else torch.bfloat16
        self._orders: dict[int, list[Action]] = {}  # per step, by its number of micro-batches
        self._report_names: list[str] | None = None
        self._kinds_passed: set[str] = set()  # of passes that this process has made before
        self._open_lanes()

    def forward_backward(
        self, batches: Sequence[Batch], count: Tensor, before_forward: Callable[[Batch, Tensor], None]
    ) -> dict[str, Tensor]:
        """Compute the gradient of the step; return its loss and the objective's report, zeros except on the last
        stage."""
        order = self._order(len(batches))
        step = _Step(batches, count)
        self._collect_gradients()
        ahead = self._receives_ahead("forward_backward")
        for index, action in enumerate(order):
            self._post_receives(step, order[index : index + ahead])
            if action.kind == "forward":
                before_forward(batches[action.micro_batch], count)
                self._forward(step, action)
            elif action.kind == "weight":
                self._weight_gradients(step, action)
            else:
                self._backward(step, action)
            step.sent = [message for message in step.sent if not message.work.is_completed()]
        for message in step.sent:
            message.wait()
        self._reduce_rest()
        self._sum_tied_gradients()
        return self._complete(step)

    @torch.no_grad()
    def forward(self, batches: Sequence[Batch], count: Tensor) -> dict[str, Tensor]:
        """Return the loss of these micro-batches and the objective's report, zeros except on the last stage."""
        order = forward_actions(self.pp, self.vpp, len(batches))
        step = _Step(batches, count)
        ahead = self._receives_ahead("forward")
        for index, action in enumerate(order):
            self._post_receives(step, order[index : index + ahead])
            self._forward(step, action)
            step.passed.clear()
        for message in step.sent:
            message.wait()
        return self._complete(step)

    def _order(self, micro_batches: int) -> list[Action]:
        if micro_batches not in self._orders:
            schedule = self.ranks.layout.schedule
            self._orders[micro_batches] = schedule_actions(schedule, self.pp, self.vpp, micro_batches)[self.rank]
        return self._orders[micro_batches]

    def _forward(self, step: _Step, action: Action) -> None:
        batch = step.batches[action.micro_batch]
        stage = self.model.stages[action.chunk]
        inputs = batch.tokens if stage.is_first else step.received.pop(action).wait()
        if not stage.is_first and torch.is_grad_enabled():
            inputs.requires_grad_()
        output = self.model(inputs, batch.positions, batch.documents, stage=action.chunk)
        if stage.is_last:
            output, report = hidden_loss(self.model, output, batch, self.objective, step.count)
            for name, value in (("loss", output.detach()), *report.items()):
                step.totals[name] = step.totals[name] + value if name in step.totals else value
        else:
            self._send(step, output.detach(), forward=True)
        edge = get_gradient_edge(output) if output.requires_grad else None
        step.passed[action.chunk, action.micro_batch] = _Passed(inputs, edge)

    def _backward(self, step: _Step, action: Action) -> None:
        """Run the whole backward pass of a chunk, or with zero-bubble only the gradient of its input."""
        place = action.chunk, action.micro_batch
        stage, passed = self.model.stages[action.chunk], step.passed.pop(place)
        gradient = None if stage.is_last else step.received.pop(action).wait()
        if action.kind == "backward" and action.micro_batch == len(step.batches) - 1:
            for layer in stage.layers:
                self._reduce_next(self.model.blocks.get_submodule(str(layer)))
        assert passed.output is not None, "a first stage without a trained parameter has no backward pass"
        if action.kind == "input":
            late = step.late[place] = LateGradients()
            with put_off(late):
                torch.autograd.backward(passed.output, gradient)
        else:
            torch.autograd.backward(passed.output, gradient)
        if not stage.is_first:
            assert passed.inputs.grad is not None, "the residual stream carries a gradient through every stage"
            self._send(step, passed.inputs.grad, forward=False)

    def _weight_gradients(self, step: _Step, action: Action) -> None:
        """Compute a chunk's deferred weight gradients; after the last ones, reduce each block as it becomes ready."""
        late = step.late.pop((action.chunk, action.micro_batch))
        if action.micro_batch < len(step.batches) - 1:
            late.run()
            self._after_backward()
            return
        for layer in reversed(self.model.stages[action.chunk].layers):
            block = self.model.blocks.get_submodule(str(layer))
            late.take(block.parameters()).run()
            self._reduce_next(block)
            self._after_backward()
        late.run()

    # messages

    def _receives_ahead(self, kind: str) -> int:
        """Return how many actions of a pass of this kind may have receives posted."""
        ahead = RECEIVES_AHEAD if kind in self._kinds_passed else FIRST_RECEIVES_AHEAD
        self._kinds_passed.add(kind)
        return ahead

    def _post_receives(self, step: _Step, actions: Sequence[Action]) -> None:
        for action in actions:
            if action.kind == "weight" or action in step.received:
                continue
            forward = action.kind == "forward"
            stage = self.model.stages[action.chunk]
            if stage.is_first if forward else stage.is_last:
                continue
            source = (self.rank + (-1 if forward else 1)) % self.pp
            lane = self._lane(source if forward else self.rank, forward)
            tensor = torch.empty(self._shape(step.batches[action.micro_batch]), dtype=self._dtype, device=self._device)
            work = dist.irecv(tensor, dist.get_global_rank(lane.group, source), group=lane.group)
            step.received[action] = _Message(work, tensor, lane)

    def _send(self, step: _Step, tensor: Tensor, forward: bool) -> None:
        target = (self.rank + (1 if forward else -1)) % self.pp
        lane = self._lane(self.rank if forward else target, forward)
        tensor = tensor.contiguous()
        work = dist.isend(tensor, dist.get_global_rank(lane.group, target), group=lane.group)
        step.sent.append(_Message(work, tensor, lane))

    def _open_lanes(self) -> None:
        """Send one number over every connection in the direction of its messages, one after the other. NCCL opens each
        direction with its first message, where both ends wait for each other, in an order that a step does not follow
        (pytorch/pytorch#160210)."""
        messages = []  # sender, receiver, lane
        for link in range(self.pp if self.vpp > 1 else self.pp - 1):
            target = (link + 1) % self.pp
            messages += [(link, target, self._lane(link, True)), (target, link, self._lane(link, False))]
        if self.model.config.has_tied_head:
            forward, backward = (lanes[0] for lanes in self.ranks.lanes)
            messages += [(0, self.pp - 1, forward), (self.pp - 1, 0, backward)]
        number = torch.zeros(1, device=self._device)
        for sender, receiver, lane in messages:
            if self.rank == sender:
                dist.send(number, dist.get_global_rank(lane.group, receiver), group=lane.group)
            elif self.rank == receiver:
                dist.recv(number, dist.get_global_rank(lane.group, sender), group=lane.group)

    def _lane(self, link: int, forward: bool) -> Peers:
        return self.ranks.lanes[0 if forward else 1][lane_of(link, self.pp)]

    def _shape(self, batch: Batch) -> tuple[int, ...]:
        rows, sequence = batch.tokens.shape
        hidden, tp = self.model.config.shape.hidden, self.ranks.layout.tp
        return (rows, sequence, hidden) if tp == 1 else (rows * sequence // tp, hidden)

    @property
    def _device(self) -> torch.device:
        return self.ranks.device

    # gradients

    def _collect_gradients(self) -> None:
        """By default, sum gradients locally and keep weights gathered."""
        model = cast("FSDPModule", self.model)
        model.set_is_last_backward(False)
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(False)

    def _reduce_next(self, module: nn.Module) -> None:
        """Make FSDP2 reduce these gradients and free the weights in its next post-backward."""
        assert isinstance(module, FSDPModule)
        module.set_requires_gradient_sync(True)
        module.set_reshard_after_backward(True)

    def _after_backward(self) -> None:
        """Run FSDP2's work at the end of a backward pass, also when weight gradients come later than autograd's."""
        cast("Any", self.model)._get_fsdp_state()._root_post_backward_final_callback()

    def _reduce_rest(self) -> None:
        cast("FSDPModule", self.model).set_is_last_backward(True)
        self._reduce_next(self.model)
        # A GPU waits here for the last reduction; on a CPU each collective is timed separately.
        with self._peers.waiting() if self._device.type == "cuda" else nullcontext():
            self._after_backward()

    @torch.no_grad()
    def _sum_tied_gradients(self) -> None:
        """Sum the gradients of a tied embedding on the first and the last rank, which both hold it."""
        first, last = self.rank == 0, self.rank == self.pp - 1
        if not self.model.config.has_tied_head or not (first or last):
            return
        gradient = self.model.embedding.weight.grad
        if gradient is None:
            return
        mine = local(gradient).contiguous()
        theirs = torch.empty_like(mine)
        lanes = [lanes[0] for lanes in self.ranks.lanes]
        other = dist.get_global_rank(lanes[0].group, self.pp - 1 if first else 0)
        sending, taking = lanes if first else reversed(lanes)
        taken = _Message(dist.irecv(theirs, other, group=taking.group), theirs, taking)
        sent = _Message(dist.isend(mine, other, group=sending.group), mine, sending)
        taken.wait()
        sent.wait()
        local(gradient).add_(theirs)

    def _complete(self, step: _Step) -> dict[str, Tensor]:
        """Return the totals under names that all ranks know; only the last stage knows the names of a report."""
        if self._report_names is None:
            names: list[Any] = [list(step.totals)]
            if self.objective.coefficients is None:
                source = dist.get_global_rank(self._peers.group, self.pp - 1)
                dist.broadcast_object_list(names, source, group=self._peers.group, device=self._device)
            self._report_names = names[0] or ["loss"]
        zero = torch.zeros((), device=self._device)
        return {name: step.totals.get(name, zero) for name in self._report_names}
