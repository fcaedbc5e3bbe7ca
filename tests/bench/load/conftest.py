"""A real server that speaks OpenAI's protocol, written for these tests; see `openai_like_server`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai_like_server import Server, openai_like_server


@pytest.fixture
def server() -> Iterator[Server]:
    with openai_like_server() as running:
        yield running
