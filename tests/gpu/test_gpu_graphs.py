"""Micro-steps as CUDA graphs: the same numbers as eager steps, whatever the job combines them with.

Eager runs of the same job are compared first: where they agree to the bit, so must the graphs. Elsewhere (a kernel
that adds in any order) the graphs may differ as much as two eager runs do, within TOLERANCE.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import GLOBAL_BATCH, SEQUENCE, VOCABULARY, Records, Text, make_trainer, tiny_job
from torch import Tensor

from craton.job.layout import Layout
from craton.job.model import ModelShape
from craton.ml.data.sample import Sample
from craton.ml.models import Decoder, DecoderConfig
from craton.ml.models.config import RoutingConfig
from craton.ml.training import Trainer, graphs
from craton.ml.training.batch import Batch
from craton.ml.training.graphs import GraphError
from craton.ml.training.objectives import CROSS_ENTROPY, Objective

TOLERANCE = 2e-2  # of a bf16 loss after ten steps
STEPS = 12
SHAPE = ModelShape("small", 2, 256, 512, 4, 2, 64, VOCABULARY, tied_embeddings=True)
QWEN = ModelShape("small-qwen", 2, 256, 512, 4, 2, 64, VOCABULARY, qk_norm=True)
MOE = ModelShape("small-moe", 2, 256, 512, 4, 2, 64, VOCABULARY, experts=4, top_k=2, moe_ffn_hidden=128)


def entropy_of_labels(log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """An objective that is not linear in the log-probabilities, and reports a sum."""
    confidence = (batch.weight * log_probs.exp()).sum()
    return -(batch.weight * log_probs).sum() - 0.1 * confidence, {"confidence": confidence}


def waits_for_the_device(log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    total = -(batch.weight * log_probs).sum()
    return total * (1.0 if total.item() > 0 else 2.0), {}


class ManyDocuments(Text):
    """Rows of one to four documents, so that batches have boundaries of different shapes."""

    def sample(self, index: int) -> Sample:
        documents = np.zeros(SEQUENCE, dtype=np.int32)
        for cut in np.random.default_rng(index).integers(1, SEQUENCE, index % 4):
            documents[cut:] += 1
        return replace(super().sample(index), documents=documents)


CASES: dict[str, dict[str, Any]] = {
    "one micro-batch": {"micro_batch": 8},
    "accumulation": {"micro_batch": 2},
    "accumulation of bf16 weights": {"micro_batch": 2, "weights": "bf16"},
    "no clipping": {"micro_batch": 4, "clip": 0},
    "fp32": {"micro_batch": 4, "precision": "fp32"},
    "fp8": {"micro_batch": 4, "precision": "fp8"},
    "documents": {"micro_batch": 2, "source": ManyDocuments()},
    "documents, one micro-batch": {"micro_batch": 8, "source": ManyDocuments()},
    "recompute": {"micro_batch": 4, "recompute": "selective"},
    "LoRA": {"micro_batch": 4, "lora": "{rank: 8}"},
    "q/k norm": {"micro_batch": 4, "config": DecoderConfig(QWEN)},
    "experts": {
        "micro_batch": 4,
        "config": DecoderConfig(MOE, routing=RoutingConfig(auxiliary_loss=0.01, bias_update=0.001)),
    },
    "an objective of one's own": {"micro_batch": 4, "objective": Objective("own", entropy_of_labels)},
    "evaluation": {"micro_batch": 4, "evaluate": "{every_steps: 3, sequences: 8}", "validation": Text()},
}


def trained(
    mode: str,
    micro_batch: int,
    folder: Path | None = None,
    source: Any = None,
    config: DecoderConfig | None = None,
    objective: Objective = CROSS_ENTROPY,
    recompute: str = "none",
    validation: Any = None,
    steps: int | None = None,
    every_steps: int | None = None,
    **train: Any,
) -> tuple[Trainer, Records]:
    options = {"precision": "bf16", "learning_rate": "1e-3", "graphs": mode, **train}
    torch.compiler.reset()  # of blocks with experts: a process compiles a function a few times only
    job = tiny_job(STEPS, **options)
    layout = Layout(micro_batch=micro_batch, recompute=recompute, precision=job.precision)
    trainer, records = make_trainer(
        job,
        layout,
        folder,
        source,
        objective,
        config or DecoderConfig(SHAPE),
        every_steps=every_steps,
        validation=validation,
        steps=steps,
        device="cuda",
    )
    trainer.fit()
    return trainer, records


def events_of(records: Records) -> list[dict[str, Any]]:
    return [fields for name, _, fields in records.events if name == "graphs"]


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_eager_steps(case: str, summary: Callable[[str], None]) -> None:
    runs = [trained(mode, **CASES[case])[1] for mode in ("off", "off", "on")]
    first, second, replayed = (records.losses for records in runs)
    assert not events_of(runs[0])
    assert [fields["is_on"] for fields in events_of(runs[2])] == [True]
    assert list(replayed) == list(range(1, STEPS + 1))
    noise = max(abs(first[step] - second[step]) for step in first)
    apart = max(abs(first[step] - replayed[step]) for step in first)
    summary(f"{case}: two eager runs {noise:.2g} apart, eager and graphs {apart:.2g}")
    if noise == 0 and case != "experts":  # whose blocks are compiled: other kernels for padded documents
        assert replayed == first
        assert repr(runs[2].norms) == repr(runs[0].norms)  # NaN without clipping
    assert replayed == pytest.approx(first, rel=TOLERANCE)


@pytest.mark.parametrize("micro_batch", [2, 8])
def test_a_resumed_run_ends_with_the_same_weights(micro_batch: int, tmp_path: Path) -> None:
    whole, records = trained("on", micro_batch, tmp_path / "whole")
    trained("on", micro_batch, tmp_path / "parts", steps=7)
    resumed, later = trained("on", micro_batch, tmp_path / "parts")
    assert list(later.losses) == list(range(8, STEPS + 1))
    assert later.losses == pytest.approx({step: records.losses[step] for step in later.losses}, rel=TOLERANCE)
    for name, weight in whole.parts.optimizer.master.items():
        torch.testing.assert_close(weight, resumed.parts.optimizer.master[name], rtol=0.01, atol=5e-4)


def test_auto_uses_graphs_where_launches_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "LAUNCH_SHARE", 0.0)
    _, records = trained("auto", micro_batch=2)
    (fields,) = events_of(records)
    assert fields["is_on"]
    assert "launching kernels takes" in fields["reason"]


def test_auto_leaves_objectives_of_users_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "LAUNCH_SHARE", 0.0)
    _, records = trained("auto", micro_batch=2, objective=Objective("own", entropy_of_labels))
    assert not events_of(records)


@pytest.mark.parametrize("micro_batch", [2, 8])
def test_a_step_that_waits_for_the_device_stays_eager(micro_batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "LAUNCH_SHARE", 0.0)
    forward = Decoder.forward

    def waits(self: Decoder, *arguments: Any, **options: Any) -> Tensor:
        hidden = forward(self, *arguments, **options)
        assert hidden.sum().item() < 1e9
        return hidden

    monkeypatch.setattr(Decoder, "forward", waits)
    stream = torch.cuda.current_stream()
    _, records = trained("auto", micro_batch=micro_batch)
    (fields,) = events_of(records)
    assert not fields["is_on"]
    assert "synchroniz" in fields["reason"]
    _, eager = trained("off", micro_batch=micro_batch)
    assert records.losses == pytest.approx(eager.losses, rel=TOLERANCE)
    assert torch.cuda.current_stream() == stream
    assert torch.cuda.get_sync_debug_mode() == 0


def test_a_capture_that_fails_leaves_the_device_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something that only a capture refuses: another thread's stream is waited for without an event of the graph."""
    monkeypatch.setattr(graphs, "LAUNCH_SHARE", 0.0)
    forward = Decoder.forward

    def refuses_capture(self: Decoder, *arguments: Any, **options: Any) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().synchronize()
        return forward(self, *arguments, **options)

    monkeypatch.setattr(Decoder, "forward", refuses_capture)
    stream = torch.cuda.current_stream()
    _, records = trained("auto", micro_batch=2)
    (fields,) = events_of(records)
    assert not fields["is_on"]
    assert torch.cuda.current_stream() == stream
    torch.cuda.empty_cache()
    _, eager = trained("off", micro_batch=2)
    assert records.losses == pytest.approx(eager.losses, rel=TOLERANCE)


def test_required_graphs_that_cannot_be_captured_are_an_error() -> None:
    with pytest.raises(GraphError, match="must not wait for the device"):
        trained("on", micro_batch=2, objective=Objective("waits", waits_for_the_device))


def test_a_rollback_goes_on_with_graphs(tmp_path: Path) -> None:
    class BadOnce(Text):
        def sample(self, index: int) -> Sample:
            sample = super().sample(index)
            if index == 8 * GLOBAL_BATCH + 5:
                sample.weight[3] = math.nan
            return sample

    _, records = trained("on", 4, tmp_path, BadOnce(), every_steps=3, on_nan="rollback")
    assert [step for name, step, _ in records.events if name == "rolled_back"]
    assert math.isfinite(records.losses[STEPS])


def test_the_origin_of_a_bad_step_is_found() -> None:
    class BadSample(Text):
        def sample(self, index: int) -> Sample:
            sample = super().sample(index)
            if index == 8 * GLOBAL_BATCH + 5:  # of the ninth step
                sample.weight[3] = math.nan
            return sample

    _, records = trained("on", micro_batch=4, source=BadSample())
    (bad,) = [(step, fields) for name, step, fields in records.events if name == "bad_step"]
    assert bad[0] == 9
    assert bad[1]["sample"] == 8 * GLOBAL_BATCH + 5
    assert math.isfinite(records.losses[STEPS])
