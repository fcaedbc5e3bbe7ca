"""Precisions that the training loop supports, without torch. Jobs are checked before ranks start."""

from __future__ import annotations

TRAINED_PRECISIONS = ("fp32", "bf16", "fp8")
