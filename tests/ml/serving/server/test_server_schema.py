"""Whatever clients send, within the API's own description or outside of it, is answered, and never by a server error.

Schemathesis makes the requests from the OpenAPI schema that the server gives out.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance
from scripted_engine import ADMIN, SECONDS, Script, Served

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance]
NUM_EXAMPLES = 5
TAKING = [
    "/v1/chat/completions", "/v1/completions", "/v1/fork", "/v1/abort", "/tokenize", "/detokenize",
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/update_weights", "/pause", "/sleep", "/wake_up",
]  # fmt: skip
GIVING = [
    "/v1/models", "/live", "/health", "/ping", "/metrics", "/version", "/is_paused", "/is_sleeping", "/weights_version",
]  # fmt: skip


@pytest.fixture(scope="module")
def fuzzed(start: Callable[..., Served]) -> Served:
    served = start("--admin")
    served.engine.answer = lambda _: Script([70, 71, 72], 2)
    return served


@pytest.fixture(scope="module")
def described(fuzzed: Served) -> schemathesis.BaseSchema:
    found: schemathesis.BaseSchema = schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")
    return found


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("path", TAKING)
def test_what_is_sent(described: schemathesis.BaseSchema, fuzzed: Served, path: str, mode: GenerationMode) -> None:
    session = requests.Session()

    @settings(
        max_examples=NUM_EXAMPLES,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=described[path]["POST"].as_strategy(mode))
    def answers(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=CHECKS, session=session, timeout=SECONDS, headers=ADMIN)

    answers()
    assert requests.get(f"{fuzzed.url}/live", timeout=SECONDS).status_code == 200


def test_what_is_asked_for(described: schemathesis.BaseSchema, fuzzed: Served) -> None:
    requests.post(f"{fuzzed.url}/wake_up", headers=ADMIN, timeout=SECONDS)  # a random request may have left it asleep
    described["/v1/models/{name}"]["GET"].Case(path_parameters={"name": "scripted"}).call_and_validate(
        checks=CHECKS, timeout=SECONDS, headers=ADMIN
    )
    for path in GIVING:
        described[path]["GET"].Case().call_and_validate(checks=CHECKS, timeout=SECONDS, headers=ADMIN)
    paths = {path for path, operations in described.items() for _ in operations}
    others = {"/v1/models/{name}", "/resume", "/reset_prefix_cache"}
    assert paths == {*TAKING, *GIVING, *others}, "every endpoint is tested here or too simple"
