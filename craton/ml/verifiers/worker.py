"""A worker that verifies answers, one after the other, inside a sandbox: exact, regex, json_schema and math.

It is started with a socket as its standard input, and has no network, no secrets and no files but libraries.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from craton.ml.verifiers.answers import exact, json_schema, regex
from craton.ml.verifiers.mathematics import math
from craton.ml.verifiers.wire import BlockingChannel

ANSWER_VERIFIERS: dict[str, Callable[..., float]] = {
    "exact": exact,
    "regex": regex,
    "json_schema": json_schema,
    "math": math,
}


def main(verifiers: Sequence[str]) -> None:
    """Answer requests until the supervisor closes the connection."""
    channel = BlockingChannel(os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    logging.disable()
    if "math" in verifiers:
        import math_verify  # noqa: F401 (before the first sample, whose limit has begun then)
    if "json_schema" in verifiers:
        import jsonschema.validators  # noqa: F401
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
        return {"error": f"{type(error).__name__}: {error}"[:1000]}
