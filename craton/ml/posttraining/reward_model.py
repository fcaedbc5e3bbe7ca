"""A reward model: a decoder with a scalar head, read from a Hugging Face folder of sequence classification with one
label, that scores whole texts. `kind: dpo` with `loss: reward` trains one, `craton export` writes its folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from craton.errors import CratonError
from craton.ml.models import Decoder, config_from_huggingface, load_weights, model_folder

BATCH_TOKENS = 16_384  # of one forward pass, padding included


class RewardModelError(CratonError):
    """The folder has no reward model, or a text cannot be scored."""


class RewardModel:
    """`score` returns one number per text: that of its last token, as transformers reads it."""

    def __init__(
        self, folder: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self.folder = model_folder(folder)  # has the tokenizer that makes the token ids
        config = config_from_huggingface(self.folder)
        if config.has_token_head:
            raise RewardModelError(
                f"{folder} is a language model without a scalar head; give a folder of a model for sequence "
                "classification with one label, e.g. an export of `kind: dpo` with `loss: reward`"
            )
        with torch.device("meta"):
            model = Decoder(config)
        self._model = model.to(dtype).to_empty(device=device).eval().requires_grad_(False)
        load_weights(self._model, self.folder)
        self._device = torch.device(device)

    @torch.no_grad()
    def score(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Return the score of each text, given as token ids. A score depends on its text alone, beyond rounding."""
        vocabulary = self._model.config.shape.vocab
        for number, text in enumerate(texts):
            if not text or max(text) >= vocabulary or min(text) < 0:
                raise RewardModelError(
                    f"text {number} has {len(text)} tokens, ids up to {max(text, default=0)}; a reward model of "
                    f"{vocabulary} tokens scores texts of at least one token, made by the tokenizer in {self.folder}"
                )
        scores = [0.0] * len(texts)
        for indices in _batches([len(text) for text in texts]):
            longest = len(texts[indices[-1]])
            # padded on the right, which causal attention never sees
            rows = [[*texts[index], *[0] * (longest - len(texts[index]))] for index in indices]
            hidden = self._model(torch.tensor(rows, device=self._device))  # [rows, sequence, hidden]
            last = hidden[torch.arange(len(rows)), [len(texts[index]) - 1 for index in indices]]
            for index, value in zip(indices, self._model.scores(last).tolist(), strict=True):
                scores[index] = value
        return scores


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield indices of texts, shortest first, in batches of at most BATCH_TOKENS after padding."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        if batch and (len(batch) + 1) * lengths[index] > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
