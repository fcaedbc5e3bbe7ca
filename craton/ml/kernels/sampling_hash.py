"""Constants of the noise that tokens are sampled with: the Triton kernel and plain PyTorch must hash alike."""

from __future__ import annotations

MIN_TEMPERATURE = 1e-5  # below which the likeliest token is chosen: dividing by less leaves the range of fp32

# The hash behind the noise is 32 bits wide, the cheapest that a GPU has: steps of `_mix` over seed, position and token,
# with two keys for a row. Multipliers: https://github.com/skeeto/hash-prospector ("lowbias32").
MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
ROW_KEYS = (0x9E3779B9, 0x3C6EF372)
