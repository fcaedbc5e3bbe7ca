"""Constants of the sampling noise: the Triton kernel and plain PyTorch must hash alike."""

from __future__ import annotations

MIN_TEMPERATURE = 1e-5  # below this the most likely token is chosen: a smaller divisor would overflow fp32

# The hash behind the noise is 32 bits wide, the cheapest on a GPU: steps of `_mix` over seed, position and token, with
# two keys per row. Multipliers: https://github.com/skeeto/hash-prospector ("lowbias32").
MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
ROW_KEYS = (0x9E3779B9, 0x3C6EF372)
