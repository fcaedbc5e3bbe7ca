"""What can be known of a reward model's folder before it is loaded."""

from __future__ import annotations

import json
from pathlib import Path

from craton.job.errors import ModelError
from craton.job.model.huggingface import is_reward_model, load_config
from craton.job.model.vocabulary import TOKENIZER, vocabulary_mismatch

EXPORT = "an export of `kind: dpo` with `preference: {loss: reward}`"
TEMPLATE = "chat_template.jinja"


def check_reward_model(folder: Path, policy: Path | None) -> None:
    """Raise ModelError if a folder cannot score texts of a policy; None: its folder is not known here."""
    config, file = load_config(folder)
    if not is_reward_model(config):
        raise ModelError(f"{folder} is a language model without a scalar head; give {EXPORT}")
    labels = config.get("num_labels") or len(config.get("id2label") or range(2))  # transformers' default is 2
    if labels != 1:
        raise ModelError(f"{file}: a classifier with {labels} labels is not a reward model; allowed: one label")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder} has no weights; give a folder with a config.json and *.safetensors")
    if not (folder / TOKENIZER).is_file():
        raise ModelError(f"{folder} has no {TOKENIZER}, which makes its token ids; copy its tokenizer there")
    if policy is not None and has_chat_template(policy) and chat_folder(folder, policy) is None:
        raise ModelError(
            f"{folder} has another vocabulary than {policy} and no chat template; put the {TEMPLATE} of its training "
            f"beside its {TOKENIZER}"
        )


def chat_folder(folder: Path, policy: Path | None) -> Path | None:
    """Return the folder whose chat template renders chats for a reward model: its own, else that of a policy with the
    same vocabulary; None: there is none."""
    if has_chat_template(folder):
        return folder
    if policy is not None and has_chat_template(policy) and not vocabulary_mismatch(policy, folder):
        return policy
    return None


def has_chat_template(folder: Path) -> bool:
    if (folder / TEMPLATE).is_file():
        return True
    try:
        document = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and bool(document.get("chat_template"))
