"""What the tests of shards share."""

from __future__ import annotations

from collections.abc import Callable

from craton.ml.data import Shards

VOCAB = 1000

MakeShards = Callable[..., Shards]
