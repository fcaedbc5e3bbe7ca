"""Data of the lifecycle: additions of two- and three-digit numbers, written with three digits each, and the answer with
its digits reversed, so that every digit follows from those before it: `047+958=5001`.

    python examples/lifecycle/sums.py FOLDER

writes a tokenizer of bytes and the data of every stage. No sum is in two files. Half of the answers for SFT forget the
carries (`047+958=5990`), as hasty people do; the others are right. A verifier sees the difference.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from craton.ml.data.tokenizing import train_tokenizer

SIZES = {"test": 1_000, "pretrain": 20_000, "sft": 60_000, "dpo": 4_000, "rl": 20_000}
FORGETFUL_SHARE = 0.5  # of the answers for SFT
VOCABULARY = 259  # bytes, the end of a document and the two tokens of chat turns: no merges
# A user's message is the sum as it is; the answer ends with the token that ends a turn.
TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
{%- else -%}
{{ message['content'] }}
{%- endif -%}
{%- endfor -%}
"""

Sum = tuple[int, int]


def question(numbers: Sum) -> str:
    return f"{numbers[0]:03d}+{numbers[1]:03d}="


def answer(numbers: Sum) -> str:
    return f"{sum(numbers):04d}"[::-1]


def forgetful_answer(numbers: Sum) -> str:
    """The answer without its carries; right for sums that have none."""
    return "".join(str((numbers[0] // 10**place + numbers[1] // 10**place) % 10) for place in range(4))


def wrong_answer(numbers: Sum, draw: random.Random) -> str:
    """One without carries, or with a wrong digit. If all forgot the carries, DPO would learn to carry always."""
    right, forgetful = answer(numbers), forgetful_answer(numbers)
    if forgetful != right and draw.random() < FORGETFUL_SHARE:
        return forgetful
    place = draw.randrange(len(right))
    digit = draw.choice([digit for digit in "0123456789" if digit != right[place]])
    return right[:place] + digit + right[place + 1 :]


def hasty_answer(numbers: Sum, draw: random.Random) -> str:
    return forgetful_answer(numbers) if draw.random() < FORGETFUL_SHARE else answer(numbers)


def draw_sums(sizes: Mapping[str, int], seed: int = 0) -> dict[str, list[Sum]]:
    """Return the sums of each file, all of them different."""
    draw = random.Random(seed)
    ranges = (range(10, 100), range(100, 1000))
    drawn: dict[Sum, None] = {}
    while len(drawn) < sum(sizes.values()):
        drawn[draw.choice(draw.choice(ranges)), draw.choice(draw.choice(ranges))] = None
    rest = iter(draw.sample(list(drawn), len(drawn)))  # else the last file would have the fewest short sums
    return {name: [next(rest) for _ in range(size)] for name, size in sizes.items()}


def write(folder: Path) -> None:
    """Write all files of the lifecycle."""
    folder.mkdir(parents=True, exist_ok=True)
    sums, draw = draw_sums(SIZES), random.Random(1)
    _write_rows(folder / "pretrain.jsonl", ({"text": question(pair) + answer(pair)} for pair in sums["pretrain"]))
    _write_rows(
        folder / "sft.jsonl",
        ({"prompt": question(pair), "completion": hasty_answer(pair, draw)} for pair in sums["sft"]),
    )
    _write_rows(
        folder / "dpo.jsonl",
        (
            {"prompt": question(pair), "chosen": answer(pair), "rejected": wrong_answer(pair, draw)}
            for pair in sums["dpo"]
        ),
    )
    for name in ("rl", "test"):
        _write_rows(
            folder / f"{name}.jsonl", ({"prompt": question(pair), "answer": answer(pair)} for pair in sums[name])
        )
    train_tokenizer([str(folder / "pretrain.jsonl")], VOCABULARY, folder / "tokenizer")
    (folder / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def _write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
