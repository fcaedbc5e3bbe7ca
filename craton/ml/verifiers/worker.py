"""A worker that verifies answers, one after the other, inside a sandbox: exact, regex, json_schema and math.

It is started with a socket as its standard input, and has no network, no secrets and no files but libraries.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from craton.errors import CratonError
from craton.ml.verifiers.answers import exact, json_schema, regex
from craton.ml.verifiers.mathematics import math
from craton.ml.verifiers.wire import BlockingChannel

ANSWER_VERIFIERS: dict[str, Callable[..., float]] = {
    "exact": exact,
    "regex": regex,
    "json_schema": json_schema,
    "math": math,
}

WARM_UPS: dict[str, dict[str, Any]] = {
    "math": {"completion": r"\boxed{\frac{1}{2}}", "reference": "0.5"},
    "json_schema": {"completion": "{}", "reference": {"type": "object"}},
}


def main(verifiers: Sequence[str]) -> None:
    """Answer requests until the supervisor closes the connection."""
    channel = BlockingChannel(os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    logging.disable()
    for verifier in WARM_UPS.keys() & set(verifiers):  # imports and caches, before the limit of a sample runs
        verified({"verifier": verifier, "options": {}, **WARM_UPS[verifier]})
    channel.send(b'{"ready": true}')
    while (message := channel.receive()) is not None:
        channel.send(json.dumps(verified(json.loads(message))).encode())


def verified(request: dict[str, Any]) -> dict[str, Any]:
    """Return {value} or {error}."""
    verifier = ANSWER_VERIFIERS[request["verifier"]]
    try:
        return {"value": verifier(request["completion"], request["reference"], request["options"])}
    except MemoryError:
        return {"error": "needs more memory than verify.memory", "exhausted": True}
    except Exception as error:  # noqa: BLE001 (whatever a library raises costs one sample and is reported)
        text = str(error) if isinstance(error, CratonError) else f"{type(error).__name__}: {error}"
        return {"error": text[:1000]}
