"""The process of a reward model: texts in, scores out, until its owner closes the connection.

All texts that wait are scored together, in order of arrival. Prompts and answers become tokens as preference pairs do,
so a score is that of the trained model on the text it was trained for.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch

from craton.errors import CratonError
from craton.formatting import percent
from craton.ml.data import DataError, PromptEncoder
from craton.ml.posttraining.reward_model import RewardModel, RewardModelError
from craton.ml.verifiers import BlockingChannel, RewardModelSetup, die_with_parent

BATCH_TOKENS = {"cpu": 2048, "cuda": 16_384}  # of the texts that are scored together


@dataclass(frozen=True)
class _Text:
    number: int
    tokens: list[int]


def start(descriptor: int, parent: int, setup: Mapping[str, Any]) -> None:
    """Load the model and score texts; a model that cannot be loaded is reported."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the group; its owner decides when this process ends
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent)
    channel = BlockingChannel(descriptor)
    try:
        scorer = TextScorer(RewardModelSetup(**setup))
    except torch.OutOfMemoryError:
        share = percent(setup["memory_share"])
        channel.send(
            _encoded(error=f"{setup['folder']} needs more than {share} of the GPU's memory; see reward_memory")
        )
    except (CratonError, OSError, RuntimeError) as error:
        channel.send(_encoded(error=f"{setup['folder']} cannot be loaded: {str(error).splitlines()[0]}"))
    else:
        channel.send(_encoded(ready=True))
        scorer.answer(channel)


class TextScorer:
    """The model with its tokenizer."""

    def __init__(self, setup: RewardModelSetup) -> None:
        has_gpu = setup.memory_share is not None and torch.cuda.is_available()
        self._device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
        if has_gpu:
            torch.cuda.set_per_process_memory_fraction(float(setup.memory_share or 0), self._device)
        is_whole = setup.precision == "fp32" or not has_gpu
        self._model = RewardModel(setup.folder, self._device, torch.float32 if is_whole else torch.bfloat16)
        self._texts = PromptEncoder(Path(setup.folder))
        self._chats = self._texts if setup.chat_folder is None else PromptEncoder(Path(setup.chat_folder))
        self._warm_up(has_chats=setup.chat_folder is not None)

    def answer(self, channel: BlockingChannel) -> None:
        """Score what comes. The connection is read beside the scoring, so its end also ends a score in work."""
        waiting: SimpleQueue[bytes] = SimpleQueue()
        threading.Thread(target=_read, args=(channel, waiting), daemon=True).start()
        while True:
            message: bytes | None = waiting.get()
            texts: list[_Text] = []
            num_tokens = 0
            while message is not None:
                if (text := self._encode(message, channel)) is not None:
                    texts.append(text)
                    num_tokens += len(text.tokens)
                message = _next(waiting) if num_tokens < BATCH_TOKENS[self._device.type] else None
            self._score(texts, channel)

    def _warm_up(self, has_chats: bool) -> None:
        """Do once what takes seconds the first time, before the limit of a sample runs."""
        self._model.score([self._texts.answered("?", "!")])
        if has_chats:
            with suppress(DataError):  # a template may reject this chat and take others
                self._chats.answered([{"role": "user", "content": "?"}], "!")

    def _encode(self, message: bytes, channel: BlockingChannel) -> _Text | None:
        head, _, body = message.partition(b"\n")
        number, sample = json.loads(head)["number"], json.loads(body)
        prompt = sample["prompt"]
        encoder = self._texts if isinstance(prompt, str) else self._chats
        try:
            return _Text(number, encoder.answered(prompt, sample["completion"]))
        except DataError as error:
            channel.send(_encoded(number=number, error=str(error)))
            return None

    def _score(self, texts: list[_Text], channel: BlockingChannel) -> None:
        """Send the score of each text. A batch that fails is scored one by one, so that a text costs no other."""
        try:
            scores: list[float] = self._model.score([text.tokens for text in texts])
        except (RewardModelError, torch.OutOfMemoryError) as error:
            if len(texts) > 1:
                for text in texts:
                    self._score([text], channel)
                return
            reason = "the text is too long for its memory" if isinstance(error, torch.OutOfMemoryError) else str(error)
            channel.send(_encoded(number=texts[0].number, error=reason))
            return
        for text, score in zip(texts, scores, strict=True):
            is_number = math.isfinite(score)
            result = {"score": score} if is_number else {"error": f"the score is {score}"}
            channel.send(_encoded(number=text.number, **result))


def _next(waiting: SimpleQueue[bytes]) -> bytes | None:
    """Return a message that waits already."""
    try:
        return waiting.get_nowait()
    except Empty:
        return None


def _read(channel: BlockingChannel, waiting: SimpleQueue[bytes]) -> None:
    """Take messages until the owner closes the connection, which ends the process."""
    try:
        while (message := channel.receive()) is not None:
            waiting.put(message)
    finally:
        os._exit(0)


def _encoded(**fields: Any) -> bytes:
    return json.dumps(fields).encode()
