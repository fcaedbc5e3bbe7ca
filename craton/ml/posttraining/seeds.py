"""Seeds of rollouts: a function of the run's seed and the prompt's index, so a lost rollout can be generated again.

The engine gives copy i of a request the seed + i (`seed_of_copy`). Prompts whose seeds are neighbours would share noise
between their copies, so seeds of prompts are multiples of a stride that is larger than any group.
"""

from __future__ import annotations

from craton.ml.serving import SEEDS

STRIDE_BITS = 20  # a group has at most 2^20 copies
STRIDE = 1 << STRIDE_BITS
_SLOT_BITS = SEEDS.bit_length() - 1 - STRIDE_BITS  # 42: number of prompts with seeds of their own, as a power of 2
_MASK = (1 << _SLOT_BITS) - 1
_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # splitmix64's


def rollout_seed(seed: int, index: int) -> int:
    """Return the seed of the first copy of prompt `index`. For one `seed` no two of 2^42 prompts share a seed, with up
    to 2^20 copies each."""
    # Each step permutes the slots, so different indices have different slots; the order looks random.
    slot = (index + _hash(seed)) & _MASK
    for multiplier in _MULTIPLIERS:
        slot ^= slot >> (_SLOT_BITS // 2)
        slot = (slot * multiplier) & _MASK  # odd multipliers
    slot ^= slot >> (_SLOT_BITS // 2)
    return slot << STRIDE_BITS


def _hash(seed: int) -> int:
    """Return 64 bits of a seed (splitmix64)."""
    word = (1 << 64) - 1
    number = (seed * _MULTIPLIERS[0] + _MULTIPLIERS[0]) & word
    number = ((number ^ number >> 30) * _MULTIPLIERS[1]) & word
    number = ((number ^ number >> 27) * _MULTIPLIERS[2]) & word
    return number ^ number >> 31
