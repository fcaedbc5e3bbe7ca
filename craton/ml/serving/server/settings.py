"""Front end settings: the options of `python -m craton.ml.serving.server`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from craton.ml.serving.server.access import ServerAccess

ToolStyle = Literal["auto", "hermes", "llama3_json", "qwen3_coder", "none"]
ReasoningStyle = Literal["think", "none"]


@dataclass(frozen=True)
class ServerSettings:
    """Settings of one front end."""

    served_name: str | None = None  # None: the engine's name for the model
    model_folder: Path | None = None  # with the tokenizer; None: prompts and answers are token ids
    access: ServerAccess = field(default_factory=ServerAccess)
    tool_style: ToolStyle = "auto"  # auto: by the chat template
    reasoning_style: ReasoningStyle = "none"
    max_waiting: int = 1024  # requests without a token; more are refused
    max_body_bytes: int = 0  # 0: by the model's context
    request_seconds: float = 0.0  # timeout of a request; 0: none
    silent_seconds: float = 60.0  # after which an engine with requests, which reports twice a second, counts as hung
    drain_seconds: float = 30.0  # for running requests after SIGTERM
