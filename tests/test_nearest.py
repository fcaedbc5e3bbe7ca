"""The name that somebody meant."""

from __future__ import annotations

import pytest

from craton.formatting import counted
from craton.nearest import SYNONYMS, did_you_mean, nearest_names

KINDS = ("pretrain", "sft", "dpo", "grpo", "serve", "command")
TARGETS = ("parallelcluster", "hyperpod-slurm", "hyperpod-eks", "eks", "pcs")


@pytest.mark.parametrize(
    ("given", "allowed", "meant"),
    [
        ("sharde", ("nvme", "shared", "object"), ["shared"]),
        ("atuo", ("auto",), ["auto"]),
        ("finetune", KINDS, ["sft"]),
        ("Fine-Tune", KINDS, ["sft"]),
        ("pre_train", KINDS, ["pretrain"]),
        ("hyperpod", TARGETS, ["hyperpod-slurm", "hyperpod-eks"]),
        ("paralellcluster", TARGETS, ["parallelcluster"]),
        ("lr", ("learning_rate", "steps"), ["learning_rate"]),
        ("per_device_train_batch_size", ("micro_batch", "tp"), ["micro_batch"]),
        ("kubernets", ("local", "slurm", "kubernetes"), ["kubernetes"]),
        ("k8s", ("local", "slurm", "kubernetes"), ["kubernetes"]),
        ("zzz", KINDS, []),
        ("", KINDS, []),
        ("a" * 5000, KINDS, []),
    ],
)
def test_nearest_names(given: str, allowed: tuple[str, ...], meant: list[str]) -> None:
    assert nearest_names(given, allowed) == meant


def test_it_is_said_as_a_question() -> None:
    assert did_you_mean("hyperpod", TARGETS) == "; did you mean 'hyperpod-slurm' or 'hyperpod-eks'?"
    assert did_you_mean("zzz", TARGETS) == ""


def test_words_of_other_tools_are_written_as_they_are_compared() -> None:
    assert all(word == word.lower() and not set(word) & set("-_. ") for word in SYNONYMS)


def test_counts_agree_with_their_nouns() -> None:
    assert [counted(number, "node") for number in (0, 1, 2, 1024)] == ["0 nodes", "1 node", "2 nodes", "1,024 nodes"]
