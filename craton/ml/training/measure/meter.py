"""What a run measures, under the names of the plan: run_X beside plan_X for every step, and at the end.

Model FLOPs per token and the peak FLOPs are those of the plan, so both MFUs use the same reference. Times are recorded
one step late; see `timing`.
"""

from __future__ import annotations

import resource
import time
import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from craton.formatting import duration, percent, rate
from craton.ml.training.parallel import Ranks
from craton.telemetry import plan_twins, read_json, result_words
from craton.telemetry.rank import Recorder

LOG_SECONDS = 5.0  # between two lines in the log of rank 0
SUMMARY_STEPS = 1000  # newest steps, whose medians are compared with the plan


@dataclass(frozen=True)
class PlannedStep:
    """The prediction in plan.json for a step and a rank."""

    twins: dict[str, float]  # under the names of the run's metrics
    memory_bytes: float
    memory_limit_bytes: float
    flops_per_token: float
    peak_flops: float  # per rank

    @classmethod
    def read(cls, path: Path) -> PlannedStep | None:
        """Return None if there is no plan, as for a model given as a function."""
        if not path.is_file():
            return None
        plan = read_json(path)
        if not plan:
            warnings.warn(
                f"{path} cannot be read: there is no comparison with the plan; `craton resume` plans again",
                stacklevel=2,
            )
        if not plan.get("mfu"):
            return None
        flops_per_second = plan["flops_per_token"] * plan["tokens_per_second"] / plan["cluster"]["num_gpus"]
        return cls(
            plan_twins(plan),
            plan["memory_bytes"],
            plan["memory_limit_bytes"],
            plan["flops_per_token"],
            flops_per_second / plan["mfu"],
        )


class Meter:
    """Records one rank's steps; rank 0 also records what all ranks share, and prints a line now and then."""

    def __init__(
        self, recorder: Recorder, ranks: Ranks, steps: int, tokens_per_step: int, prediction: PlannedStep | None
    ) -> None:
        self.prediction = prediction
        self._recorder, self._ranks = recorder, ranks
        self._steps, self._tokens_per_step = steps, tokens_per_step
        self._measured: deque[dict[str, float]] = deque(maxlen=SUMMARY_STEPS)
        self._evaluations: dict[int, dict[str, float]] = {}
        self._recorded = 0.0  # seconds spent recording until the last step
        self._printed = 0.0
        self._first = True
        if prediction is not None and ranks.rank == 0:
            recorder.event("predicted", step=0, **prediction.twins)

    def step(self, step: int, phases: dict[str, float], shared: dict[str, float], rank_gradient_norm: float) -> None:
        """Record one finished step: seconds of its phases on this rank, numbers shared by all ranks, and the norm of
        this rank's part of the gradient (NaN if none was computed), which is where a GPU with wrong results shows
        first."""
        seconds = sum(phases.values())
        measured = {
            "step_seconds": seconds,
            **{f"{name}_seconds": value for name, value in phases.items()},
            "memory_bytes": float(peak_memory_bytes(self._ranks.device)),
        }
        if self._ranks.rank == 0:
            tokens = shared.get("step_tokens", float(self._tokens_per_step))  # of rollouts, as many as were generated
            measured["tokens_per_second"] = tokens / seconds
            if self.prediction is not None:
                flops = self.prediction.flops_per_token * measured["tokens_per_second"]
                measured["mfu"] = flops / (self.prediction.peak_flops * self._ranks.world)
            if not self._first:  # the first step compiles and warms up: recorded, but not representative
                self._measured.append(measured)
            self._first = False
            self._print(step, measured, shared)
            measured = measured | shared
            if "step_tokens" not in shared:
                measured["tokens"] = step * self._tokens_per_step
            if step in self._evaluations:
                measured |= self._evaluations.pop(step)
        recorded = self._recorder.recording_seconds
        measured["rank_gradient_norm"] = rank_gradient_norm
        measured["recording_share"] = (recorded - self._recorded) / seconds
        self._recorded = recorded
        self._recorder.metrics(step, **{f"run_{name}": value for name, value in measured.items()})

    def evaluation(self, step: int, validation: Mapping[str, float], suite: Mapping[str, float]) -> None:
        """Record the reports of `data.validation` and of a suite with the other numbers of this step, which come later.
        Rollouts have no loss."""
        names = {name: "evaluation_loss" if name == "loss" else f"validation_{name}" for name in validation}
        numbers = {names[name]: value for name, value in validation.items()}
        self._evaluations[step] = {**numbers, **suite}
        if self._ranks.rank == 0 and (numbers or suite):
            words = [f"{name.replace('_', ' ')} {value:.4g}" for name, value in numbers.items()]
            print("  ".join([f"step {step}", *words, *result_words(suite)]), flush=True)

    def late_evaluation(self, step: int, suite: Mapping[str, float]) -> None:
        """Record the report of a suite beside the other numbers of a step, which are recorded already."""
        if self._ranks.rank == 0:
            self._recorder.metrics(step, **{f"run_{name}": value for name, value in suite.items()})
            print("  ".join([f"step {step}", *result_words(suite)]), flush=True)

    def summary(self, step: int, outcome: str) -> None:
        """Record predicted against measured: the median of the newest steps, without the first one."""
        if self._ranks.rank != 0 or not self._measured:
            return
        measured = {name: median(item[name] for item in self._measured) for name in self._measured[-1]}
        measured["memory_bytes"] = self._measured[-1]["memory_bytes"]
        predicted = self.prediction.twins if self.prediction else {}
        self._recorder.event("summary", step=step, outcome=outcome, measured=measured, predicted=predicted)
        for name, value in measured.items():
            plan = f"  predicted {predicted[name]:>12.4g}" if name in predicted else ""
            print(f"{name:<24} measured {value:>12.4g}{plan}", flush=True)

    def _print(self, step: int, measured: dict[str, float], shared: dict[str, float]) -> None:
        now = time.monotonic()
        if step not in (1, self._steps) and now - self._printed < LOG_SECONDS:
            return
        self._printed = now
        parts: list[Any] = [
            f"step {step}/{self._steps}",
            f"loss {shared['loss']:.4f}",
            *result_words(shared),
            f"norm {shared['gradient_norm']:.3g}",
            f"lr {shared['learning_rate']:.3g}",
            duration(measured["step_seconds"]),
            rate(measured["tokens_per_second"], "tokens"),
        ]
        if "mfu" in measured:
            parts.append(f"MFU {percent(measured['mfu'])}")
        print("  ".join(parts), flush=True)


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this rank so far: of the GPU, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
