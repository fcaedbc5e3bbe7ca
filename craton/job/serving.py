"""Checks of kind serve: of its keys against each other, and of what is served."""

from __future__ import annotations

import json
import re
from pathlib import Path

from craton.job.document import KeyConflictError
from craton.job.layout import LayoutSpec
from craton.job.model import Int4Format, ModelShape, ModelSpec, is_function
from craton.job.sections import Data, RecoverSection
from craton.job.sections.serving import (
    ACTIVATIONS,
    NOT_OF_A_SERVER,
    OWN_PRECISIONS,
    PLANNED_ENGINES,
    PLANNED_LAYOUT,
    LoadSection,
    Serve,
)


def is_planned_only(software: str) -> bool:
    """Return whether a server of this software is planned but not run by Craton: `vllm`, `sglang@0.5`, or a profile
    file of such an engine."""
    return served_engine(software) in PLANNED_ENGINES


def served_engine(software: str, folder: Path = Path()) -> str:
    """Return the engine that a server's software names, or that its profile file is of; empty: the file is not one."""
    path = folder / Path(software).expanduser()
    if "/" not in software and path.suffix not in (".toml", ".json"):
        return re.split(r"[^a-z]", software.lower())[0]
    try:
        profile = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return ""
    return str(profile.get("engine", "")) if isinstance(profile, dict) else ""


def check_server_keys(
    model: ModelSpec | None,
    data: Data,
    layout: LayoutSpec | None,
    recover: RecoverSection,
    serve: Serve,
    software: str,
    folder: Path,
) -> None:
    """Raise KeyConflictError for the first key that does not apply to a server; `folder`: that of the job file."""
    engine = served_engine(software, folder)
    # A file that is no profile is an error of its own, with its own message.
    is_planned = engine in PLANNED_ENGINES or not engine
    if isinstance(model, str) and is_function(model):
        raise KeyConflictError(
            f"kind serve requires a model that Craton builds, but {model} is a function; give a preset, a folder, a "
            "Hub id or a run",
            ("model",),
            ("kind",),
        )
    if data != Data():
        raise KeyConflictError("kind serve reads no data; remove `data:`", ("data",), ("kind",))
    for key in layout.model_fields_set if layout else ():
        if key in NOT_OF_A_SERVER and not (key in PLANNED_LAYOUT and is_planned):
            raise KeyConflictError(f"layout: {key} does not apply to a server: {NOT_OF_A_SERVER[key]}", ("layout", key))
    if serve.attention_dp > 1 and not is_planned:
        raise KeyConflictError(
            f"serve: attention_dp applies to plans of {', '.join(PLANNED_ENGINES)} (key software), not of {software}; "
            "remove it",
            ("serve", "attention_dp"),
        )
    check_precisions(serve, software, folder)
    if recover.spares:
        raise KeyConflictError(
            "recover: a server runs on one node and has no spares; remove recover.spares",
            ("recover", "spares"),
            ("kind",),
        )


def check_precisions(serve: Serve, software: str, folder: Path = Path()) -> None:
    """Raise KeyConflictError if weights, activations and KV cache cannot have these precisions together."""
    engines = ", ".join(PLANNED_ENGINES)
    is_own = served_engine(software, folder) not in (*PLANNED_ENGINES, "")
    if is_own and serve.precision not in OWN_PRECISIONS:
        raise KeyConflictError(
            f"serve: precision {serve.precision} applies to plans of {engines} (key software), not of {software}; use "
            f"{', '.join(OWN_PRECISIONS)}",
            ("serve", "precision"),
        )
    if is_own and serve.activation_precision != "auto":
        raise KeyConflictError(
            f"serve: activation_precision applies to plans of {engines} (key software), not of {software}, which "
            "multiplies fp8 weights in fp8 and int4 weights in bf16; remove it",
            ("serve", "activation_precision"),
        )
    if serve.activation_precision not in ACTIVATIONS[serve.precision]:
        raise KeyConflictError(
            f"serve: weights in {serve.precision} are not multiplied with activations in {serve.activation_precision}; "
            f"activation_precision may be {', '.join(ACTIVATIONS[serve.precision])}",
            ("serve", "activation_precision"),
            ("serve", "precision"),
        )
    if serve.kv_precision == "bf16" and serve.precision == "fp32":
        raise KeyConflictError(
            "serve: a model in fp32 has its KV cache in fp32 or fp8; write kv_precision auto or fp8, or precision bf16",
            ("serve", "kv_precision"),
            ("serve", "precision"),
        )


def check_stored_precision(serve: Serve, name: str, stored: Int4Format | None) -> None:
    """Raise KeyConflictError if the weights of the model are stored in 4 bits and another precision was written."""
    if stored is not None and "precision" in serve.model_fields_set and serve.precision != "int4":
        raise KeyConflictError(
            f"serve: the weights of {name} are stored in 4 bits ({stored.method}), so precision {serve.precision} "
            "does not apply; remove precision, or give the model in 16 bits",
            ("serve", "precision"),
            ("model",),
        )


def check_served_model(
    serve: Serve, name: str, max_length: int, shape: ModelShape | None, draft: ModelShape | None
) -> None:
    """Raise KeyConflictError if the model, or its draft model, cannot be served so. `name`: of the model in the API."""
    longest = shape.max_sequence if shape else 0
    if longest and max_length > longest:
        raise KeyConflictError(
            f"serve: max_length {max_length:,} exceeds the model's maximum sequence length of {longest:,} tokens",
            ("serve", "max_length"),
        )
    if shape is not None and draft is not None and draft.vocab > shape.vocab:
        raise KeyConflictError(
            f"serve.speculate: the draft model's vocabulary of {draft.vocab:,} tokens exceeds the model's, "
            f"{shape.vocab:,}; use a draft model with the same tokenizer",
            ("serve", "speculate", "model"),
        )
    if serve.load is not None:
        check_load(serve, serve.load, max_length)
    if name in serve.adapters:
        raise KeyConflictError(
            f"serve.adapters: {name!r} is the name of the model; set serve.served_name, or rename the adapter",
            ("serve", "adapters"),
        )


def check_load(serve: Serve, load: LoadSection, max_length: int) -> None:
    """Raise KeyConflictError if a server with this context length cannot have the load."""
    longest = load.input.longest + load.output.longest
    if longest > max_length:
        raise KeyConflictError(
            f"serve.load: input {load.input.longest:,} and output {load.output.longest:,} tokens are {longest:,}, "
            f"above the context length of {max_length:,}; shorten them",
            ("serve", "load"),
        )
    if load.acceptance is not None and not serve.draft_tokens:
        raise KeyConflictError(
            "serve.load: acceptance applies to speculative decoding; set serve.speculate, or remove it",
            ("serve", "load", "acceptance"),
        )
