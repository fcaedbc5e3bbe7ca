"""How a front end is set up; what `python -m craton.ml.serving.server` takes as options."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from craton.ml.serving.server.access import ServerAccess

ToolStyle = Literal["auto", "hermes", "llama3_json", "qwen3_coder", "none"]
ReasoningStyle = Literal["think", "none"]


@dataclass(frozen=True)
class ServerSettings:
    """The defaults suit one model for one team."""

    served_name: str | None = None  # None: the engine's name for the model
    model_folder: Path | None = None  # with the tokenizer; None: prompts are tokens, and so are answers
    access: ServerAccess = field(default_factory=ServerAccess)
    tool_style: ToolStyle = "auto"  # auto: by the chat template
    reasoning_style: ReasoningStyle = "none"
    max_waiting: int = 1024  # requests that have no token yet; one more is refused
    max_body_bytes: int = 0  # 0: by the model's context
    request_seconds: float = 0.0  # until a request is given up; 0: never
    silent_seconds: float = 60.0  # after which an engine with requests, which speaks twice a second, counts as hanging
    drain_seconds: float = 30.0  # that running requests have after SIGTERM
