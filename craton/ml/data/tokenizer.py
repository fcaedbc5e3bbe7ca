"""Tokenizers as folders with a tokenizer.json: find them, train them, and compare them.

Accepts any Hugging Face tokenizer: a folder (local or at an s3:// URL), a tokenizer.json, or a Hub id (the local cache
first; the network only if it is not there and HF_HUB_OFFLINE is not set). A trained tokenizer is a byte-level BPE, so
it can encode any text.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from craton.ml.data.errors import DataError
from craton.ml.data.shards import TokenizerMark
from craton.remote import is_url

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"
END_OF_DOCUMENT = "<|endoftext|>"
CHAT_TOKENS = ("<|im_start|>", "<|im_end|>")
# Files that belong to a tokenizer besides tokenizer.json; shard folders and exported models include them.
COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")

_USUAL_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
_PROBE = "def f(x):\n\treturn x + 1  # naïve, 数 42, don't\n\n    The  end… of 1,234.5 <|endoftext|>"


def find_tokenizer(name: str) -> Path:
    """Return the folder with the tokenizer.json of a folder, a file or a Hub id."""
    path = mirror_tokenizer(name) if is_url(name) else Path(name).expanduser()
    if path.is_file() and path.name == TOKENIZER:
        return path.parent
    if path.is_dir():
        return path if (path / TOKENIZER).is_file() else _without_file(path)
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise DataError(
            f"tokenizer {name!r}: no such folder with a {TOKENIZER}; give a folder or a Hub id, or train a BPE"
        )
    return _from_hub(name)


def mirror_tokenizer(url: str) -> Path:
    """Return the local folder for a folder at a URL, with the tokenizer's files, if it has any."""
    from craton.infrastructure.storage import mirror

    return mirror(url, lambda name: name in (TOKENIZER, *COMPANIONS))


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer without truncation or padding."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception as error:  # noqa: BLE001  (the Rust side raises plain Exception)
        raise DataError(f"{folder / TOKENIZER}: cannot be read as a tokenizer: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def mark_of(folder: Path, name: str | None = None) -> TokenizerMark:
    """Return the identity of this tokenizer."""
    tokenizer = load_tokenizer(folder)
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    # Identified by what it does, not by its file: different versions write the same tokenizer differently.
    does = [sorted(vocabulary.items()), tokenizer.encode(_PROBE).ids]
    return TokenizerMark(
        name=name or folder.name,
        vocab_size=max(vocabulary.values()) + 1,
        fingerprint=hashlib.sha256(json.dumps(does).encode()).hexdigest()[:32],
        file_sha256=_file_sha256(folder),
    )


def check_same_tokenizer(mark: TokenizerMark, where: Path, folder: Path, whose: str) -> None:
    """Check that the tokenizer in the folder is the one that made the shards."""
    if _file_sha256(folder) == mark.file_sha256:
        return
    other = mark_of(folder)
    if other.fingerprint != mark.fingerprint:
        raise DataError(
            f"{where}: made with tokenizer {mark.name} ({mark.vocab_size:,} ids), which is not {whose}, {folder} "
            f"({other.vocab_size:,} ids); tokenize again with `--tokenizer {folder}`"
        )


def end_of_document(folder: Path, tokenizer: Tokenizer) -> int | None:
    """Return the end-of-text id: the one in the tokenizer's files, else a common one; None if there is none."""
    named = [_named(folder / file, "eos_token") for file in ("tokenizer_config.json", "special_tokens_map.json")]
    for token in (*named, *_USUAL_ENDS):
        if token is not None and (token_id := tokenizer.token_to_id(token)) is not None:
            return int(token_id)
    return None


def train_bpe(texts: Iterable[str], vocabulary: int, folder: Path) -> None:
    """Train a byte-level BPE of at most `vocabulary` ids and write it into the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    smallest = 256 + 1 + len(CHAT_TOKENS)
    if vocabulary < smallest:
        raise DataError(
            f"a BPE vocabulary of {vocabulary} is too small; bytes and special tokens need {smallest}; try 4096"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_DOCUMENT, *CHAT_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / TOKENIZER))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_DOCUMENT,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def copy_tokenizer(source: Path, to: Path) -> None:
    """Copy the tokenizer's files next to the shards or the model."""
    for name in (TOKENIZER, *COMPANIONS):
        if (source / name).is_file():
            shutil.copyfile(source / name, to / name)


def _from_hub(name: str) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError

    cached = try_to_load_from_cache(name, TOKENIZER) if "/" in name else None
    if isinstance(cached, str):
        return Path(cached).parent
    if "/" not in name or os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise DataError(
            f"tokenizer {name!r} is not a folder and not in the local Hugging Face cache; fetch it once with "
            f"`hf download ORGANISATION/NAME {TOKENIZER} tokenizer_config.json`, give a folder with a {TOKENIZER}, or "
            "train one with --train-bpe 4096 (data.tokenizer: bpe:4096)"
        )
    try:
        path = Path(hf_hub_download(name, TOKENIZER))
        for companion in COMPANIONS:
            try:
                hf_hub_download(name, companion)
            except EntryNotFoundError:
                continue
    except Exception as error:  # noqa: BLE001  (the Hub client raises many types for "not available")
        raise DataError(
            f"tokenizer {name!r} cannot be fetched from the Hub: {str(error).splitlines()[0]}; check the name, "
            f"HF_TOKEN for gated models, or give a folder with a {TOKENIZER}"
        ) from None
    return path.parent


def _without_file(folder: Path) -> Path:
    raise DataError(
        f"tokenizer {str(folder)!r} has no {TOKENIZER}; write one with transformers: "
        f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
    )


def _named(path: Path, key: str) -> str | None:
    """Return a special token from the tokenizer's files: a string, or an object that contains it."""
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8")).get(key)
    except (OSError, ValueError, AttributeError):
        return None
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _file_sha256(folder: Path) -> str:
    return hashlib.sha256((folder / TOKENIZER).read_bytes()).hexdigest()
