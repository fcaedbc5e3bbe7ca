"""Tokenizes and detokenizes text. The bytes of a token are exact, even for a part of a character."""

from __future__ import annotations

import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers.decoders import DecodeStream

from craton.ml.data import load_tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
HELD_TOKENS = 8  # a character has up to four bytes; one that is incomplete by then is invalid
CONTEXT_TOKENS = 5  # of the prompt: some tokenizers drop the space before the first token they decode

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TextTooLongError(ValueError):
    """A text has more tokens than allowed."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"{num_tokens} tokens")
        self.num_tokens = num_tokens


class Vocabulary:
    """The tokenizer of a model folder. `encode` is thread-safe."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = load_tokenizer(folder)
        self._bytes: dict[int, bytes] = {}
        # A token's name has at least one letter per byte, or per character.
        self.longest_token_bytes = max((len(name.encode()) for name in self.tokenizer.get_vocab()), default=1)

    def encode(self, text: str, with_special_tokens: bool, max_tokens: int | None = None) -> list[int]:
        """Tokenize a text. `with_special_tokens`: add those that the tokenizer puts around every text, such as BOS.
        Raise TextTooLongError for more than `max_tokens`."""
        # `encode` holds the GIL; the batch call releases it.
        (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=with_special_tokens)
        if max_tokens is not None and len(encoding) > max_tokens:
            raise TextTooLongError(len(encoding))
        return list(encoding.ids)

    def decode(self, tokens: list[int], keep_special: bool = False) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=not keep_special))

    def token_bytes(self, token: int) -> bytes:
        result = self._bytes.get(token)
        if result is None:
            result = self._bytes[token] = self._bytes_of(token)
        return result

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode(errors="replace")

    def _bytes_of(self, token: int) -> bytes:
        name = self.tokenizer.id_to_token(token)
        if name is None:
            return b""  # models have more logits than their tokenizers have tokens
        if (match := _BYTE_TOKEN.fullmatch(name)) is not None:
            return bytes([int(match[1], 16)])
        if self._is_byte_level and all(letter in _LETTERS for letter in name):
            return bytes(_LETTERS[letter] for letter in name)
        # A single token may lose its leading space; after another token it keeps it.
        probe = self.tokenizer.decode([token, token], skip_special_tokens=False)
        alone = self.tokenizer.decode([token], skip_special_tokens=False)
        return str(probe[len(alone) :]).encode() if probe.startswith(alone) else alone.encode()

    @cached_property
    def _is_byte_level(self) -> bool:
        decoder = json.loads(self.tokenizer.to_str())["decoder"] or {}
        return any(part["type"] == "ByteLevel" for part in decoder.get("decoders", [decoder]) if part)


class Detokenizer:
    """Detokenizes one answer incrementally: returns a character once all its bytes have arrived."""

    def __init__(self, vocabulary: Vocabulary, prompt: tuple[int, ...], keep_special: bool = False) -> None:
        self._vocabulary = vocabulary
        self._keep_special = keep_special
        context = list(prompt[-CONTEXT_TOKENS:])
        # If the prompt ends inside a character, do not return its part again.
        if vocabulary.decode(context, keep_special).endswith(REPLACEMENT):
            context = []
        self._stream = self._new_stream(context)
        self._held: list[int] = []

    def feed(self, token: int) -> str:
        text: str | None = self._stream.step(self._vocabulary.tokenizer, token)
        if text is not None:
            self._held.clear()
            return text
        self._held.append(token)
        return self.finish() if len(self._held) > HELD_TOKENS else ""

    def finish(self) -> str:
        """Return the held text, with replacement characters for incomplete ones."""
        held, self._held = self._held, []
        if not held:
            return ""
        self._stream = self._new_stream([])
        return self._vocabulary.decode(held, self._keep_special)

    def _new_stream(self, context: list[int]) -> Any:
        return DecodeStream(ids=context, skip_special_tokens=not self._keep_special)


class TokenNumbers:
    """The text of a model without a tokenizer: its token ids."""

    def feed(self, token: int) -> str:
        return f" {token}"

    def finish(self) -> str:
        return ""


def _byte_letters() -> dict[str, int]:
    """Return the letters of byte-level tokenizers: printable bytes are themselves, the others start at 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_LETTERS = _byte_letters()
