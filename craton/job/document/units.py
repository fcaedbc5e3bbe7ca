"""Numbers as people write them: `15T` tokens, `4k` sequences, `5m`, `80GiB`, `3200Gbps`.

Each `parse_*` takes a YAML value (a number or a string) and returns a number in the base unit, or raises a ValueError
with examples. The annotated types below use them in the pydantic models.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated

from pydantic import PlainValidator

MAX_NUMBER = 1e18  # bytes, tokens, FLOP/s, seconds: beyond any cluster; floats are exact integers only up to 2^53
MAX_SIZE = 10**9  # of a small integer: heads, layers, nodes, steps between checkpoints
MAX_WHOLE = 2**63 - 1  # of an identifier, such as a seed
# Commas separate thousands only: `1,5` is no number of tokens.
_NUMBER = r"(?P<number>(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9][0-9_]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|\.[0-9]+)"
_DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12, "p": 1e15}
_BINARY = {"": 1.0, "k": 2.0**10, "m": 2.0**20, "g": 2.0**30, "b": 2.0**30}
_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_SI = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_IEC = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}


def parse_count(value: object) -> int:
    """Parse `1000`, `1_000`, `8M`, `1.5B`, `15T`: decimal suffixes; the result must be a whole number."""
    return _whole(value, _DECIMAL, "a count", "4096, 4k, 8M or 15T")


def parse_token_count(value: object) -> int:
    """Parse the tokens of a sequence or a batch: `4k` is 4096 and `8M` is 8 x 1024 x 1024, as is customary."""
    return _whole(value, _BINARY, "a number of tokens", "4096, 8k or 4M (k and M are powers of 1024 here)")


def parse_seconds(value: object) -> float:
    """Parse a duration such as `90`, `90s`, `5m`, `1h30m`, `2d` to seconds."""
    how = "a duration; write e.g. 30s, 5m, 1h30m or 2d"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _positive(float(value), value, how)
    text = str(value).replace(" ", "")
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)([a-z]*)", text)
    are_known = all(unit in _SECONDS for _, unit in parts)
    if not parts or not are_known or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"{shown_value(value)} is not {how}")
    return _positive(sum(float(number) * _SECONDS[unit] for number, unit in parts), value, how)


def parse_share(value: object) -> float:
    """Parse `10%` or `0.1`: a share above 0, up to 1."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(%?)\s*", "" if isinstance(value, bool) else str(value))
    share = float(match[1]) / (100.0 if match[2] else 1.0) if match else 0.0
    if not 0.0 < share <= 1.0:
        raise ValueError(f"{shown_value(value)} is not a share; write e.g. 10% or 0.1, above 0 and at most 100%")
    return share


def parse_bytes(value: object) -> float:
    """Parse `80GiB`, `1.2TB`, `4096` to bytes."""
    how = "a size in bytes; write e.g. 80GiB, 1.2TB or a plain number of bytes"
    return _scaled(value, r"(?P<prefix>[kKMGTP]i?|)B?", {**_SI, **_IEC}, how)


def parse_bytes_per_second(value: object) -> float:
    """Parse `400GB/s`, `3200Gbps`, `55e9` to bytes per second; `Gbps` means bits."""
    how = "a rate; write e.g. 400GB/s, 3200Gbps or a plain number of bytes per second"
    if isinstance(value, str) and (bits := re.fullmatch(rf"{_NUMBER} ?(?P<prefix>[kKMGT]?)(?:bps|bit/s|b/s)", value)):
        return _positive(_number(bits) * _SI[bits["prefix"]] / 8, value, how)
    return _scaled(value, r"(?P<prefix>[kKMGTP]i?|)B/s", {**_SI, **_IEC}, how)


def parse_flops(value: object) -> float:
    """Parse `989T`, `989TFLOPS`, `9.89e14` to floating-point operations per second."""
    how = "a FLOP rate; write e.g. 989T, 989 TFLOPS or 9.89e14"
    return _scaled(value, r"(?P<prefix>[kKMGTPE]?)(?:FLOPS|FLOP/s|FLOPs)?", _SI, how)


Count = Annotated[int, PlainValidator(parse_count)]
TokenCount = Annotated[int, PlainValidator(parse_token_count)]
Seconds = Annotated[float, PlainValidator(parse_seconds)]
Bytes = Annotated[float, PlainValidator(parse_bytes)]
BytesPerSecond = Annotated[float, PlainValidator(parse_bytes_per_second)]
Flops = Annotated[float, PlainValidator(parse_flops)]


def whole_number(at_least: int = 1, at_most: int | None = None) -> Callable[[object], int]:
    """Return a validator of small integers, where `4k` is most likely a typo."""
    allowed = f"a whole number from {at_least}" + (f" to {at_most}" if at_most is not None else "")

    def parse(value: object) -> int:
        number = value
        if isinstance(value, str) and re.fullmatch(r"[-+]?[0-9]+", value.strip()):
            number = int(value)
        if isinstance(value, float) and value.is_integer():
            number = int(value)
        if isinstance(number, bool) or not isinstance(number, int):
            raise ValueError(f"{shown_value(value)} is not {allowed}")
        if number < at_least or (at_most is not None and number > at_most):
            raise ValueError(f"{shown_value(value)} is not {allowed}")
        return number

    return parse


Size = Annotated[int, PlainValidator(whole_number(1, MAX_SIZE))]
Whole = Annotated[int, PlainValidator(whole_number(0, MAX_WHOLE))]


def _whole(value: object, scale: Mapping[str, float], description: str, examples: str) -> int:
    how = f"{description}; write e.g. {examples}"
    number = _scaled(value, r"(?P<prefix>[kKmMbBgGtTpP]?)", scale, how)
    if abs(number - round(number)) > 1e-6:
        raise ValueError(f"{shown_value(value)} is {number:g}, not a whole number; write e.g. {examples}")
    return round(number)


def _scaled(value: object, suffix: str, scale: Mapping[str, float], how: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _positive(float(value), value, how)
    match = re.fullmatch(rf"{_NUMBER} ?{suffix}", str(value).strip()) if isinstance(value, str) else None
    if match is None:
        hint = "; a comma separates thousands, as in 4,096" if isinstance(value, str) and "," in value else ""
        raise ValueError(f"{shown_value(value)} is not {how}{hint}")
    prefix = match["prefix"] if match["prefix"] in scale else match["prefix"].lower()
    if prefix not in scale:
        raise ValueError(f"{shown_value(value)} is not {how}")
    return _positive(_number(match) * scale[prefix], value, how)


def _number(match: re.Match[str]) -> float:
    return float(match["number"].replace("_", "").replace(",", ""))


def _positive(number: float, value: object, how: str) -> float:
    if math.isnan(number) or number <= 0:
        raise ValueError(f"{shown_value(value)} is not above zero, so it is not {how}")
    if number > MAX_NUMBER:
        raise ValueError(f"{shown_value(value)} is too large (maximum {MAX_NUMBER:.0e}) to be {how}")
    return number


def shown_value(value: object) -> str:
    """Return a value as messages show it: short, with quotes around a text."""
    if value is None:
        return "nothing"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
