"""The training loop: one for every objective and any number of ranks.

A step never waits for the device. The label count is summed over ranks on the device, so loss normalization needs no
CPU synchronization. Loss, gradient norm and times are read one step later, when they have arrived. The same sum carries
stop requests, so all ranks stop after the same step, with a checkpoint. Besides tensors, the state is two integers, the
step and the next global sample, so any number of ranks can resume exactly.
"""

from __future__ import annotations

import gc
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from craton.ml.models import Decoder, MoE
from craton.ml.training.batch import Batch
from craton.ml.training.checkpoint.peer import PEER
from craton.ml.training.fault_search import FaultSearch, Origin
from craton.ml.training.graphs import GraphError, MicroStepGraphs, graph_obstacle
from craton.ml.training.guard import BadStep, StepGuard, TrainingStoppedError, describe_out_of_memory, is_out_of_memory
from craton.ml.training.last_save import save_for_good
from craton.ml.training.measure import BatchStatistics, HostCopy, Readout, StepRecords, StepTimer
from craton.ml.training.objectives import batch_loss, divide_means, label_weight
from craton.ml.training.parallel import Pipeline, accumulate_gradients, sum_uncut_gradients
from craton.ml.training.parts import Parts, StepLoader
from craton.ml.training.saves import Saves

DISTRUST_STEPS = 5  # after a restore from peer memory, in which a non-finite loss is attributed to it

COLLECT_STEPS = 100  # between two garbage collections, the same on every rank so that none waits for another's

LEDGER_SECONDS = 1.0  # between two ledger lines: the maximum that a crash loses

Outcome = Literal["done", "stopped", "left"]  # left: for a planned generation, without a failure


class Trainer:
    """Trains until the last step, until `stop` is called on any rank, or until step `stop_at` is done."""

    def __init__(self, parts: Parts, stop_at: int | None = None, reached: int = 0, broke_at: float = 0.0) -> None:
        """`reached` is the last step that an earlier generation recorded: steps up to it are repeated. `broke_at` is
        when that generation broke (monotonic clock), if it did."""
        assert parts.job.train is not None
        self.parts = parts
        self.train = parts.job.train
        self.last_step = min(parts.schedule.steps, stop_at or parts.schedule.steps)
        self.step = 0  # the last step begun
        self.loader: StepLoader | None = None
        self.guard = StepGuard(self.train)
        self.timer = StepTimer(parts.ranks.device)
        self.timer.watch(parts.model, parts.ranks.peers)
        self.pipeline = Pipeline(parts.model, parts.ranks, parts.objective) if parts.ranks.pipeline else None
        self.graphs = self._make_graphs()
        self.search = FaultSearch(parts.model, parts.objective, parts.ranks, self.pipeline)
        self._batch_statistics = BatchStatistics()
        self._batch_metrics: dict[str, float] = {}  # of the current step, on rank 0
        self._doing = "start"
        self._stop_asked = self._leaving = False
        self.check: Callable[[], None] = _nothing  # raises when this generation is over
        self.saves = Saves(parts, reached, broke_at)
        self.records = StepRecords()
        self._leaves = False  # agreed by all ranks
        self._lacks_evaluation = False  # of the suite at this step, which was due
        self._next_nodes: tuple[str, ...] = ()  # nodes of the next generation, if this rank was informed of it
        self._step_seconds: deque[float] = deque(maxlen=9)
        self._unread: Readout | None = None  # numbers of the previous step, on their way to the host
        self._is_sealed = False
        self._intact: Readout | None = None  # numbers that had arrived when the generation broke
        self._first_step = 0
        self._redo_until = reached
        self._booked = 0.0
        self._balanced: list[Any] = [module for module in parts.model.modules() if hasattr(module, "update_bias")]
        self._auxiliary: list[Any] = [module for module in parts.model.modules() if hasattr(module, "aux_weight")]

    def stop(self) -> None:
        """Request a stop after the current step; safe in a signal handler."""
        self._stop_asked = True

    def leave(self, nodes: Sequence[str]) -> None:
        """Request to leave after the current step; the next generation, on these nodes, takes over its state."""
        self._next_nodes, self._leaving = tuple(nodes), True

    def seal(self) -> None:
        """Call before communicators are aborted, from any thread: what a device computes after that may be garbage; it
        is neither recorded nor kept."""
        late = self._unread
        with suppress(RuntimeError):  # the device may be lost
            self._intact = late if late is not None and late.numbers.has_arrived else None
        self._is_sealed = True
        self.parts.checkpointer.seal()

    def abandon(self, seconds: float) -> bool:
        """Release what does not involve other ranks: writer threads, shared memory. Return False if a thread does not
        end in time."""
        late, self._unread = self._unread, None
        if late is not None and self._is_intact(late):  # this step is done, and is not repeated if its state was kept
            with suppress(RuntimeError):
                loss, norm, own_norm, _, *report = late.numbers.read()
                shared = {"loss": loss, "gradient_norm": norm, "learning_rate": late.learning_rate}
                shared |= dict(zip(late.report_names, report, strict=True))
                self.parts.meter.step(late.step, late.times.seconds(), shared, own_norm)
        return self.parts.checkpointer.abandon(seconds)

    def _is_intact(self, late: Readout) -> bool:
        if late.numbers.is_on_host:
            return True
        return late is self._intact if self._is_sealed else late.numbers.has_arrived

    def fit(self) -> Outcome:
        """Restore the latest state, train, and save a checkpoint of the last step."""
        try:
            return self._fit()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            prediction, has_graphs = self.parts.meter.prediction, self.graphs is not None and self.graphs.is_on
            raise describe_out_of_memory(
                self._doing, self.parts.ranks, self.train, prediction, has_graphs=has_graphs
            ) from error
        finally:
            gc.enable()
            if self.loader is not None:
                self.loader.close()

    def _fit(self) -> Outcome:
        parts = self.parts
        counters = self._restore()
        self.saves.check_kept(counters)
        self._begin(counters)
        self.saves.complete_records(counters)
        self._first_step = self.step + 1
        self.saves.reserve(self.step)
        stopping = self._complete_evaluation()
        gc.collect()
        gc.disable()
        self.timer.begin()
        while self.step < self.last_step and not stopping:
            stopping = self._train_step()
            if not stopping:  # an unsaved state is superseded by training on
                parts.clock.page.set_beside("unsaved", False)
            if stopping or self.step == self.last_step:
                self._record_previous_step(None)  # the numbers of the last step may still cause a rollback
        if stopping and self._leaves and self.step < self.last_step:
            self._doing = "checkpoint"
            if not self.saves.keep(self.counters(), self._next_nodes):
                save_for_good(self.saves, self.counters(), self.check)
            self.saves.report()
            return "left"
        is_done = self.step >= parts.schedule.steps and not self._lacks_evaluation
        outcome: Outcome = "done" if is_done else "stopped"
        self.saves.report_recovery(self.step, self.check)  # of a generation that broke after the last step
        self._save_for_good()
        parts.meter.summary(self.step, outcome)
        parts.recorder.ledger(self.step, parts.clock.take())
        return outcome

    def _train_step(self) -> bool:
        """Run one step; return True if any rank was asked to stop."""
        parts, clock = self.parts, self.parts.clock
        self.check()
        self.step += 1
        clock.begin_step(self.step)
        assert self.loader is not None
        first_sample, rate = self.loader.state, parts.schedule.learning_rate(self.step)
        updates: list[Tensor] = []
        while not updates or not self.loader.is_step_done:
            batches, agreed, numbers, names = self._train_update(rate)
            updates.append(numbers)
        copied = HostCopy(_averaged(updates))
        self.records.add(self.step, rate, copied, names, dict(self.loader.metrics))

        if parts.checkpointer.due(self.step, last=self.step == self.last_step):
            self._checkpoint()
        self.timer.mark("checkpoint")

        times, kept = self.timer.finish(), self.search.kept(batches)
        samples, metrics = range(first_sample, self.loader.state), self._batch_metrics
        self._record_previous_step(
            Readout(self.step, samples, rate, copied, names, times, agreed, metrics, kept, tuple(self.loader.pending))
        )
        self.saves.report_recovery(self.step, self.check)
        self._evaluate_when_due()
        self._run_periodic_work()
        _, stops, leaves, recorded = agreed.read()
        self.check()
        self.records.written(int(recorded))
        return self._ends_here() if self._lacks_evaluation else self._heed(stops, leaves)

    def _train_update(self, rate: float) -> tuple[list[Batch], HostCopy, Tensor, list[str]]:
        """Run one optimizer update, of which a step usually has one; return its batches, what ranks agreed on, and its
        numbers with the names of those that the objective reports."""
        parts, clock = self.parts, self.parts.clock
        clock.switch("data")
        batches = self._load()
        assert self.loader is not None
        self.timer.mark("data", self.loader.phase_seconds)
        if self.step <= self._redo_until:
            clock.page.repeat_rollouts()

        clock.switch(self._kind_of_step())
        count, agreed = self._agree(batches)
        loss, report = self._forward_backward(batches, count)
        self.timer.mark("compute")

        if parts.checkpointer.finish_copy():
            self.timer.mark("checkpoint")
        self.check()
        numbers = self._update(rate, loss, report)
        self.timer.mark("optimizer")
        return batches, agreed, numbers, list(report)

    def _load(self) -> list[Batch]:
        self._doing = "data"
        assert self.loader is not None
        context = self.parts.ranks.connections.context
        loaded = self.loader.next()
        is_first = self.parts.ranks.rank == 0
        self._batch_metrics = {**self._batch_statistics.add(loaded), **self.loader.metrics} if is_first else {}
        batches = [Batch.from_arrays(arrays).cut(context) for arrays in loaded]
        if self.parts.ranks.device.type == "cuda":
            batches = [batch.pin().to(self.parts.ranks.device) for batch in batches]
        return batches

    def _agree(self, batches: list[Batch]) -> tuple[Tensor, HostCopy]:
        """Return the objective's count of the step, which divides the loss. For the host: the weight of all labels, how
        many ranks were asked to stop or to leave, and up to which step rank 0's agent has written its records."""
        ranks, objective = self.parts.ranks, self.parts.objective
        count, labels = (
            torch.stack([number(batch) for batch in batches]).double().sum() * ranks.counts_labels
            for number in (objective.count, label_weight)
        )
        recorded = self.parts.clock.page.recorded_step if ranks.rank == 0 else 0
        asked = (float(self._stop_asked), float(self._leaving), float(recorded))
        numbers = torch.stack((labels, *(torch.full_like(count, number) for number in asked), count))
        with self.timer.waiting():
            self.parts.ranks.sum(numbers)
        return numbers[-1].clamp(min=1.0).float(), HostCopy(numbers[:-1])

    def _forward_backward(
        self, batches: list[Batch], count: Tensor, is_eager: bool = False
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the gradient of the step; return its loss and the objective's report, summed over micro-batches and
        ranks."""
        parts = self.parts
        replayed = None if self.graphs is None or is_eager else self._replay(self.graphs, batches, count)
        if replayed is not None:
            totals = replayed
        elif self.pipeline is None:
            totals = self._run_micro_batches(batches, count)
        else:
            self._doing = "backward"  # or forward: in a pipeline they alternate
            totals = self.pipeline.forward_backward(batches, count, self._weigh_auxiliary)
        sums = torch.stack([value.float() for value in totals.values()]) * parts.ranks.counts_loss
        with self.timer.waiting():
            parts.ranks.sum(sums)
        summed = dict(zip(totals, sums, strict=True))
        return summed.pop("loss"), divide_means(summed)

    def _run_micro_batches(self, batches: list[Batch], count: Tensor) -> dict[str, Tensor]:
        parts = self.parts
        totals: dict[str, Tensor] = {}
        for index, batch in enumerate(batches):
            accumulate_gradients(parts.model, parts.ranks.layout, last=index == len(batches) - 1)
            for name, value in self._micro_step(batch, count).items():
                totals[name] = totals[name] + value if name in totals else value
            if index < len(batches) - 1:
                parts.optimizer.accumulate()
            if parts.shares_gpu:
                # Ranks take turns on the GPU. When another rank dies, every collective that is already launched takes a
                # turn to notice the abort, so a rank that runs far ahead delays the recovery by seconds.
                torch.cuda.current_stream().synchronize()
        return totals

    def _micro_step(self, batch: Batch, count: Tensor) -> dict[str, Tensor]:
        """Run forward and backward pass of a micro-batch; return its share of the loss and of the objective's sums."""
        parts = self.parts
        self._weigh_auxiliary(batch, count)
        self._doing = "forward"
        with self.graphs.measured() if self.graphs is not None else nullcontext():
            loss, report = batch_loss(parts.model, batch, parts.objective, count)
        self._doing = "backward"
        loss.backward()
        return {"loss": loss.detach(), **report}

    def _make_graphs(self) -> MicroStepGraphs | None:
        """Return None if the micro-steps of this rank cannot run as CUDA graphs, or the job does not want it."""
        mode, parts = self.train.graphs, self.parts
        obstacle = graph_obstacle(parts.ranks)
        if mode == "on" and obstacle:
            raise GraphError(f"train.graphs: on is not possible: {obstacle}; write graphs: auto")
        # what Python code of users does beside the tensors would happen once, at the capture
        is_users = not parts.objective.has_own_slope or not isinstance(parts.model, Decoder)
        if obstacle or mode == "off" or (mode == "auto" and is_users):
            return None
        return MicroStepGraphs(mode, self._micro_step, parts.optimizer)

    def _replay(self, graphs: MicroStepGraphs, batches: list[Batch], count: Tensor) -> dict[str, Tensor] | None:
        """Run the micro-batches as CUDA graphs; return None if they are not in use."""
        self._doing = "forward"
        totals = graphs.run(batches, count)
        if graphs.note:
            self.saves.say(f"step {self.step}: CUDA graphs {graphs.note}")
            self.saves.event("graphs", self.step, is_on=graphs.is_on, reason=graphs.note)
            graphs.note = ""
            self.parts.checkpointer.measure_again()  # steps take another time from here on
        return totals

    def _weigh_auxiliary(self, batch: Batch, count: Tensor) -> None:
        """Weigh the load-balancing losses. They are means over the tokens of a micro-batch, so each has the share of
        these tokens in the objective's count, including those on other ranks."""
        if not self._auxiliary:
            return
        context = self.parts.ranks.connections.context
        own = self.parts.objective.count(batch)
        share = (own if context is None else context.sum(own)) / count
        for module in self._auxiliary:
            module.aux_weight = share

    def _update(self, rate: float, loss: Tensor, report: dict[str, Tensor]) -> Tensor:
        """Run one optimizer step, which the device skips if the loss or the gradient is bad; return its numbers: loss,
        gradient norm, this rank's norm, whether the step counted, then the report."""
        self._doing = "optimizer"
        parts = self.parts
        good = loss < self.guard.highest_loss
        sum_uncut_gradients(parts.optimizer.parameters.values(), parts.ranks)
        norm = parts.optimizer.step(rate, self.train.clip, good)
        parts.optimizer.zero_grad()
        report |= self._expert_metrics()
        for module in self._balanced:
            module.update_bias()
        own_norm = parts.optimizer.rank_gradient_norm
        return torch.stack((loss, norm, own_norm, good.float(), *report.values()))

    def _expert_metrics(self) -> dict[str, Tensor]:
        """Return how this rank's tokens are spread over the experts of its layers, on the device."""
        loads = [module.expert_load for module in self._balanced if isinstance(module, MoE)]
        if not loads:
            return {}
        load = torch.stack(loads)  # [layers, experts]
        ratio = (load.amax(dim=-1) / load.mean(dim=-1).clamp(min=1e-9)).amax()
        return {"idle_expert_share": (load == 0).float().mean(), "expert_load_ratio": ratio}

    def _record_previous_step(self, readout: Readout | None) -> None:
        """Record and judge the previous step, whose numbers have arrived from the device."""
        late = self._unread
        if late is None:
            self._unread = readout
            return
        loss, norm, own_norm, good, *report = late.numbers.read()
        self.check()  # of aborted collectives these numbers are garbage
        self._unread = readout
        fault = self.guard.judge(late.step, loss, norm, bool(good))
        shared = {"loss": loss, "gradient_norm": norm, "learning_rate": late.learning_rate}
        shared |= {"skipped_steps": self.guard.skipped_steps, **dict(zip(late.report_names, report, strict=True))}
        shared |= {"label_share": late.agreed.read()[0] / self.parts.job.global_batch_tokens, **late.batch}
        phases = late.times.seconds()
        self.parts.meter.step(late.step, phases, shared, own_norm)
        if not self.parts.clock.is_shared:  # without an agent the line is already in the file
            self.parts.clock.page.recorded_step = late.step
        self._step_seconds.append(sum(phases.values()))
        self.parts.clock.page.step_seconds = median(self._step_seconds)
        if not math.isfinite(loss) and self._distrust_memory(late.step, loss):
            return
        if fault is not None:
            origin = None if fault.is_finite else self._find_origin(late)
            self._apply_policy(fault, late, origin)

    def _find_origin(self, late: Readout) -> Origin | None:
        """Return where a step that is not finite went bad. All ranks come here together, after its gradients are gone:
        the search computes them again."""
        parts = self.parts
        share = len(late.samples) // parts.ranks.data_world
        own = late.samples.start + parts.ranks.data_rank * share
        with parts.clock.kind("redo"):
            origin = self.search.find(late.kept, own, parts.optimizer.parameters, self._repeat_backward)
        parts.optimizer.zero_grad()
        for module in self._balanced:
            if isinstance(module, MoE):
                module.expert_load.zero_()
        self.timer.begin()
        return origin

    def _repeat_backward(self, batches: Sequence[Batch]) -> None:
        count, _ = self._agree(list(batches))
        self._forward_backward(list(batches), count, is_eager=True)
        sum_uncut_gradients(self.parts.optimizer.parameters.values(), self.parts.ranks)

    def _apply_policy(self, fault: BadStep, late: Readout, origin: Origin | None) -> None:
        found = {"first_sample": late.samples.start, "last_sample": late.samples.stop - 1}
        found |= {} if origin is None else origin.fields()
        self.saves.event("bad_step", fault.step, reason=fault.reason, policy=fault.policy, **found)
        where = f" ({origin})" if origin is not None else ""
        self.saves.say(f"step {fault.step}: {fault.reason}{where}; policy: {fault.policy}")
        if fault.policy == "rollback":
            self._roll_back(fault, late)
        elif fault.policy == "stop":
            advice = "`craton resume` starts from the last checkpoint before it"
            if not fault.counted:  # the weights are still those before the bad step
                self._save_for_good()
                advice = f"the weights before it are saved as step {self.step}"
            raise TrainingStoppedError(f"step {fault.step}: {fault.reason}{where}, and the policy is stop; {advice}")

    def _roll_back(self, fault: BadStep, late: Readout) -> None:
        """Roll back to the last checkpoint and continue after the samples of the bad step."""
        reached = self.step
        with self.parts.clock.kind("restore"):
            counters = self._restore(before=fault.step)
        if counters is None:
            self.saves.say(f"step {fault.step}: there is no checkpoint to roll back to yet; training continues")
            return
        self.guard.rolled_back(counters["step"], fault)
        self._return_to({**counters, "next_sample": late.samples.stop, "pending": late.pending}, reached)
        self.saves.event("rolled_back", self.step, reached=reached, reason=fault.reason)

    def _distrust_memory(self, step: int, loss: float) -> bool:
        """Handle a non-finite loss soon after a restore from peer memory: the state there may be corrupt, and a lower
        tier may have a good one. Return whether there was one to return to. Happens at most once per generation."""
        report = self.parts.checkpointer.restored
        if report is None or report.tier != PEER or step > report.step + DISTRUST_STEPS:
            return False
        reached = self.step
        with self.parts.clock.kind("restore"):
            counters = self._restore(trust_peer=False)
        reason = f"the loss is {loss} {step - report.step} steps after step {report.step} was restored from peer memory"
        self.saves.event("peer_distrusted", step, reason=reason)
        if counters is None:
            self.saves.say(f"step {step}: {reason}, and no other tier has a checkpoint; training continues")
            return False
        self.saves.say(f"step {step}: {reason}; going back to step {counters['step']} of {self.saves.restored_tier}")
        self._return_to(counters, reached)
        return True

    def _return_to(self, counters: dict[str, Any], reached: int) -> None:
        self._redo_until = max(self._redo_until, reached)
        self._unread = None
        self._begin(counters)
        self.timer.begin()

    def _restore(self, before: int | None = None, trust_peer: bool = True) -> dict[str, Any] | None:
        self._doing = "restore"
        return self.saves.restore(before, trust_peer)

    def _begin(self, counters: dict[str, Any] | None) -> None:
        """Continue from these counters; None: from the beginning."""
        if self.loader is not None:
            self.loader.close()
        self.records.begin(counters)
        self.step = counters["step"] if counters else 0
        self.loader = self.parts.open_loader(counters["next_sample"] if counters else 0)
        self.loader.check = self.check
        self.loader.pending = tuple(counters.get("pending") or ()) if counters else ()

    def _checkpoint(self) -> None:
        self._doing = "checkpoint"
        self.saves.save(self.counters())

    def _save_for_good(self) -> None:
        self._doing = "checkpoint"
        save_for_good(self.saves, self.counters(), self.check)

    def _run_periodic_work(self) -> None:
        """Periodic work besides the steps: save reports, garbage collection, ledger."""
        self.saves.report()
        if self.step % COLLECT_STEPS == 0:
            gc.collect(1)
        now = time.monotonic()
        if now - self._booked >= LEDGER_SECONDS:
            self._booked = now
            self.parts.recorder.ledger(self.step, self.parts.clock.take())

    @property
    def _is_evaluation_due(self) -> bool:
        wanted = self.train.evaluate
        return wanted is not None and (self.step % wanted.every_steps == 0 or self.step == self.last_step)

    def _evaluate_when_due(self) -> None:
        parts = self.parts
        if not self._is_evaluation_due:
            return
        self._doing = "evaluation"
        with parts.clock.kind("evaluate"):
            validation = {} if parts.evaluate is None else parts.evaluate(self.pipeline)
            suite = self._evaluate_suite()
        self.check()
        parts.meter.evaluation(self.step, validation, suite)
        self.timer.begin()

    def _evaluate_suite(self) -> dict[str, float]:
        """Return the metrics of the suite; empty without one, or if a rank was asked to stop or to leave. After the
        last step there is no next generation to leave for."""
        suite = self.parts.suite
        if suite is None:
            return {}
        is_last = self.step == self.last_step
        found = suite.evaluate(self.step, self.check, lambda: self._stop_asked or (self._leaving and not is_last))
        self._lacks_evaluation = not found
        return found

    def _complete_evaluation(self) -> bool:
        """Evaluate the suite with the restored weights if that was due, and a stop or a failure came first. Return True
        if a rank was asked to stop again."""
        suite = self.parts.suite
        if suite is None or self.step == 0 or not self._is_evaluation_due:
            return False
        self._doing = "evaluation"
        with self.parts.clock.kind("evaluate"):
            found = suite.find(self.step) or self._evaluate_suite()
        self.check()
        if found:
            self.parts.meter.late_evaluation(self.step, found)
        return self._lacks_evaluation and self._ends_here()

    def _ends_here(self) -> bool:
        """Return True after agreeing why an evaluation of the suite was left: the state of its step is kept, so that it
        is completed first when training resumes."""
        asked = (float(self._stop_asked), float(self._leaving))
        numbers = self.parts.ranks.sum(torch.tensor(asked, dtype=torch.float64, device=self.parts.ranks.device))
        return self._heed(*numbers.tolist())

    def _heed(self, stops: float, leaves: float) -> bool:
        """Return whether any rank was asked to stop or to leave; a stop comes first."""
        self._leaves = bool(leaves) and not stops
        return bool(stops or leaves)

    def _kind_of_step(self) -> str:
        if self.step == self._first_step:
            return "compile"
        return "redo" if self.step <= self._redo_until else "productive"

    def counters(self) -> dict[str, Any]:
        assert self.loader is not None
        pending = {"pending": list(self.loader.pending)} if self.loader.pending else {}
        return {"step": self.step, "next_sample": self.loader.state, **pending, "records": self.records.later()}


def _averaged(updates: Sequence[Tensor]) -> Tensor:
    """Return the numbers of a step of several updates: their means; it counts only if all of its updates do."""
    if len(updates) == 1:
        return updates[0]
    numbers = torch.stack(tuple(updates))
    mean = numbers.mean(dim=0)
    mean[3] = numbers[:, 3].amin()
    return mean


def _nothing() -> None:
    """Default check: without an agent a generation is never over."""
