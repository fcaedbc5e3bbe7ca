"""Lengths of prompts and answers: a number, a range, or a distribution, in the format of the command line.

    512                  fixed
    100..1024            uniform, both ends included
    normal(512,128)      mean and standard deviation, in tokens
    lognormal(512,400)   mean and standard deviation of the lengths themselves, in tokens

A drawn length is an integer of 1 or more.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

import numpy as np

from craton.bench.load.errors import WorkloadError

_NUMBER = r"\s*(\d+(?:\.\d+)?)\s*"
_RANGE = re.compile(r"\s*(\d+)\s*\.\.\s*(\d+)\s*")
_DISTRIBUTION = re.compile(rf"\s*(normal|lognormal)\s*\({_NUMBER},{_NUMBER}\)\s*")


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths. `first` and `second`: both ends of a range, or mean and standard deviation."""

    kind: Literal["fixed", "uniform", "normal", "lognormal"]
    first: float
    second: float = 0.0

    def __str__(self) -> str:
        if self.kind == "fixed":
            return f"{self.first:g}"
        if self.kind == "uniform":
            return f"{self.first:g}..{self.second:g}"
        return f"{self.kind}({self.first:g},{self.second:g})"

    def draw(self, generator: np.random.Generator) -> int:
        match self.kind:
            case "fixed":
                return int(self.first)
            case "uniform":
                return int(generator.integers(int(self.first), int(self.second), endpoint=True))
            case "normal":
                length = generator.normal(self.first, self.second)
            case "lognormal":
                # mean m, deviation s: sigma² = ln(1 + s²/m²), mu = ln(m) − sigma²/2
                variance = math.log1p((self.second / self.first) ** 2)
                length = generator.lognormal(math.log(self.first) - variance / 2, math.sqrt(variance))
        return max(1, round(length))


def parse_lengths(text: str, option: str) -> Lengths:
    """Parse lengths; `option` names the command-line option in errors."""
    if text.strip().isdecimal():
        lengths = Lengths("fixed", int(text))
    elif match := _RANGE.fullmatch(text):
        lengths = Lengths("uniform", int(match[1]), int(match[2]))
        if lengths.second < lengths.first:
            raise WorkloadError(f"{option} {text}: write the smaller number of a range first")
    elif match := _DISTRIBUTION.fullmatch(text):
        lengths = Lengths("normal" if match[1] == "normal" else "lognormal", float(match[2]), float(match[3]))
    else:
        raise WorkloadError(
            f"{option} {text!r} is not a length; write 512, 100..1024, normal(512,128) or lognormal(512,400), in tokens"
        )
    if lengths.first < 1:
        raise WorkloadError(f"{option} {text}: the minimum length is 1 token")
    return lengths
