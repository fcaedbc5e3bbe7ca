"""What learns: models, kernels, data and training. The only package that needs torch; importing this name does not."""

from __future__ import annotations

# What the loop trains today, for whoever checks a job before ranks are started; the rest can be planned only.
TRAINED_PRECISIONS = ("fp32", "bf16", "fp8")

__all__ = ["TRAINED_PRECISIONS"]
