"""The state of the request in each row, on the device: its next token, sampling parameters, token counts for penalties.

Steps find it by row number, so a request is set up once and a step sends only what has changed.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from craton.ml.serving.device.sampler import Tuning
from craton.ml.serving.device.upload import Upload
from craton.ml.serving.schedule import StepInput, has_penalties

# sampling parameters of a row, with the values that change nothing
NUMBERS = {
    "temperature": 0.0,
    "logprob_temperature": 0.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "presence": 0.0,
    "frequency": 0.0,
    "repetition": 1.0,
}


@dataclass
class RowTable:
    """The state of the request in each row. Numbers are kept on the host and sent when one changes."""

    rows: int
    vocabulary: int
    device: torch.device
    next_token: Tensor = field(init=False)
    written: Tensor | None = None  # int32 [rows, vocabulary]
    seen: Tensor | None = None  # bool [rows, vocabulary]

    def __post_init__(self) -> None:
        self.next_token = torch.zeros(self.rows, dtype=torch.int64, device=self.device)
        self._host = np.zeros((len(NUMBERS), self.rows), np.float32)
        self._host[:] = np.asarray([list(NUMBERS.values())], np.float32).T
        self._whole = np.zeros((4, self.rows), np.int32)  # seeds in two halves, top_k, adapter
        self._whole[3] = -1
        self._numbers = torch.from_numpy(self._host.copy()).to(self.device)
        self.numbers = dict(zip(NUMBERS, self._numbers, strict=True))
        self.seeds, self.top_k = (torch.zeros(self.rows, dtype=torch.int64, device=self.device) for _ in range(2))
        self.adapters = torch.full((self.rows,), -1, dtype=torch.int32, device=self.device)

    def shared(self) -> RowTable:
        """Return a table of the same requests and sampling parameters, with its own next tokens."""
        other = copy.copy(self)
        other.next_token, other.written, other.seen = torch.zeros_like(self.next_token), None, None
        return other

    def start(self, work: StepInput, upload: Upload) -> None:
        """Set up the rows of new requests, and the next tokens that only the host knows."""
        if work.next_tokens:
            sent = upload.send(np.asarray(work.next_tokens, np.int32)).long()
            self.next_token[sent[:, 0]] = sent[:, 1]
        if not work.starts:
            return
        for start in work.starts:
            sampling, row = start.sampling, start.row
            self._host[:, row] = (
                sampling.temperature,
                sampling.temperature if sampling.logprobs_mode == "sampled" else 0.0,
                sampling.top_p,
                sampling.min_p,
                sampling.presence_penalty,
                sampling.frequency_penalty,
                sampling.repetition_penalty,
            )
            low = start.seed & 0xFFFFFFFF
            self._whole[:, row] = (low - (low >> 31 << 32), start.seed >> 32, sampling.top_k, start.adapter)
            if has_penalties(sampling):
                self._count(row, start.prompt, start.written)
        self._numbers.copy_(upload.send(self._host.view(np.int32)).view(torch.float32))
        low, high, top_k, adapters = upload.send(self._whole)
        self.seeds.copy_((high.long() << 32) | (low.long() & 0xFFFFFFFF))
        self.top_k.copy_(top_k)
        self.adapters.copy_(adapters)

    def tuning(self, work: StepInput, rows: Tensor, allowed: Tensor | None) -> Tuning:
        """Return the sampling parameters of the requests in these rows."""
        places = work.sampled_rows

        def asked(name: str) -> Tensor | None:
            host = self._host[list(NUMBERS).index(name)]
            return self.numbers[name][rows] if bool((host[places] != NUMBERS[name]).any()) else None

        presence, frequency, repetition = asked("presence"), asked("frequency"), asked("repetition")
        counts = self.written is not None and (presence is not None or frequency is not None)
        sees = self.seen is not None and repetition is not None
        added = None
        if work.added:
            index, token, value = zip(*work.added, strict=True)
            added = (
                torch.tensor(index, device=self.device),
                torch.tensor(token, device=self.device),
                torch.tensor(value, dtype=torch.float32, device=self.device),
            )
        return Tuning(
            top_k=self.top_k[rows] if bool(self._whole[2][places].any()) else None,
            top_p=asked("top_p"),
            min_p=asked("min_p"),
            presence=presence,
            frequency=frequency,
            repetition=repetition,
            written=self.written[rows] if counts and self.written is not None else None,
            seen=self.seen[rows] if sees and self.seen is not None else None,
            added=added,
            allowed=allowed,
        )

    def count(self, rows: Tensor, tokens: Tensor) -> None:
        """Count sampled tokens for the penalties of the next ones."""
        if self.written is not None and self.seen is not None:
            token_ids = tokens.clamp(min=0)
            self.written[rows, token_ids] += 1
            self.seen[rows, token_ids] = True

    def _count(self, row: int, prompt: tuple[int, ...], written: tuple[int, ...]) -> None:
        if self.written is None or self.seen is None:
            self.written = torch.zeros(self.rows, self.vocabulary, dtype=torch.int32, device=self.device)
            self.seen = torch.zeros(self.rows, self.vocabulary, dtype=torch.bool, device=self.device)
        counts = torch.bincount(torch.tensor(written, dtype=torch.int64), minlength=self.vocabulary)
        self.written[row] = counts.to(self.device, torch.int32)
        self.seen[row] = self.written[row] > 0
        self.seen[row, torch.tensor(prompt, dtype=torch.int64, device=self.device)] = True
