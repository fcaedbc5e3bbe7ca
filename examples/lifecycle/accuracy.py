"""How many sums a model answers right, greedily and at temperature 1: the serving engine answers, a verifier checks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from craton.job.sections.posttraining import RewardTerm, VerifySection
from craton.ml.data import end_of_document, end_of_turn, load_tokenizer
from craton.ml.export import open_model
from craton.ml.serving.clients import EngineTexts, InferenceRequest, generate
from craton.ml.serving.engine import build_engine
from craton.ml.serving.messages import Sampling
from craton.ml.serving.settings import EngineSettings
from craton.ml.verifiers import VerifierPool, VerifierSample

SAMPLES = 4  # at temperature 1, for each sum
MAX_TOKENS = 6
SEED_STRIDE = 1000  # between the seeds of two sums: no two samples share their random numbers


@dataclass(frozen=True)
class Accuracy:
    """Right answers to each sum: a share of its samples, and whether the greedy answer is right."""

    sampled: list[float]
    greedy: list[float]

    @property
    def mean(self) -> float:
        return sum(self.sampled) / len(self.sampled)

    @property
    def greedy_mean(self) -> float:
        return sum(self.greedy) / len(self.greedy)


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def measure(model: str, rows: Sequence[dict[str, Any]], seed: int = 0) -> Accuracy:
    """Ask a run or a folder for the answers to these rows."""
    opened = open_model(model)
    folder = opened.tokenizer_folder()
    ends = {end_of_document(folder, load_tokenizer(folder)), end_of_turn(folder)} - {None}
    decoder: Any = opened.model(torch.device("cpu"), torch.float32)
    engine = build_engine(decoder, EngineSettings(max_length=64), [end for end in ends if end is not None])
    texts = EngineTexts.of_folder(folder)

    def answers(temperature: float, copies: int) -> list[list[str]]:
        requests = [
            InferenceRequest(
                row["prompt"], Sampling(MAX_TOKENS, temperature, seed=seed + number * SEED_STRIDE), copies=copies
            )
            for number, row in enumerate(rows)
        ]
        return [[answer.text for answer in copies] for copies in generate(engine, requests, texts)]

    with VerifierPool([RewardTerm(verifier="exact")], VerifySection()) as pool:

        def shares(texts: list[list[str]]) -> list[float]:
            samples = [
                VerifierSample(row["prompt"], text, row)
                for row, answers in zip(rows, texts, strict=True)
                for text in answers
            ]
            right = [float(verdict.reward or 0.0) for verdict in pool.verify(samples)]
            each = len(right) // len(rows)
            return [sum(right[place : place + each]) / each for place in range(0, len(right), each)]

        return Accuracy(shares(answers(1.0, SAMPLES)), shares(answers(0.0, 1)))
