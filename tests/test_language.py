"""The field's words: they are found in the docs, and private words are not used where the field has its own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "craton"
GLOSSARY = ROOT / "docs" / "glossary.md"
PAGES = [page for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")) if page != GLOSSARY]

# What ML-infrastructure engineers search for: Craton has it, and a page about it says so in these words.
FIELD_TERMS = """
activation checkpointing; admission control; all-gather; all-reduce; all-to-all; AdamW; bf16; block table; chunked
prefill; collective; context parallel; continuous batching; CUDA graph; data parallel; DCGM; decode; distributed
checkpoint; draft tokens; elastic; expert parallel; exposed communication; fault tolerance; fork server; fp8; FSDP2;
gang scheduling; goodput; gradient accumulation; gradient clipping; heartbeat; HSDP; in-memory checkpoint; KV cache;
latency; leader election; learning-rate schedule; LoRA; loss mask; matmul; MFU; micro-batch; mixed precision;
mixture of experts; multi-node; NCCL; OpenAI-compatible; optimizer state; paged attention; pipeline parallel;
preemption; prefill; prefix cache; preflight; quantization; reduce-scatter; rendezvous; resharding; roofline; root
cause; sequence packing; sequence parallel; speculative decoding; straggler; structured output; supervised
fine-tuning; tensor parallel; throughput; topology-aware; TTFT; TPOT; warm-up; XID; zero-bubble; ZeRO
"""
NOT_IN_CRATON = ("disaggregated", "ring attention")
TERMS = [" ".join(term.split()) for term in FIELD_TERMS.split(";")]

FORBIDDEN = re.compile(
    r"(?<![A-Za-z_])(mend|anew|told|whoever|whom|guilty|deeds?|lemons?|nobody|council|nursery|pulse|glances?|roofs)(?![A-Za-z_])",
    re.IGNORECASE,
)
# (path under craton/, text that holds the word) → why it stays.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("agent/launch.py", "nursery"): "key of launch.json, and the module that old run directories name there",
    ("agent/processes/fork_server.py", "nursery"): "name of its log file and variable, in run directories that exist",
    ("orchestration/local.py", "nursery"): "module that old run directories name",
    ("orchestration/watching/recoveries.py", "nursery"): "key of launch.json",
    ("observability/web/readers/logs.py", "nursery"): "name of the log file",
    ("cli/views/heal.py", "lemons"): "key of the JSON that `craton heal --json` prints",
    ("observability/healing/actions.py", "deeds"): "key of the JSON that `craton heal --json` prints",
    ("observability/healing/policy.py", "deed"): "key of the JSON that `craton heal --json` prints",
    ("observability/web/actions.py", "deed"): "reads the JSON of `craton heal --json`",
}


@pytest.mark.parametrize("term", TERMS)
def test_a_term_of_the_field_is_found_in_the_docs(term: str) -> None:
    words = r"[\s-]+".join(re.escape(word) for word in re.split(r"[\s-]", term))
    pattern = re.compile(rf"(?<!\w){words}", re.IGNORECASE)
    assert any(pattern.search(page.read_text(encoding="utf-8")) for page in PAGES), (
        f"{term}: on no page but the glossary"
    )


@pytest.mark.parametrize("term", NOT_IN_CRATON)
def test_the_glossary_says_what_craton_does_not_have(term: str) -> None:
    assert re.search(rf"{term}.*not implemented", GLOSSARY.read_text(encoding="utf-8"))


def test_there_are_enough_terms() -> None:
    assert len(TERMS) == len(set(TERMS)) >= 60


def texts(path: Path) -> Iterator[str]:
    """String constants and docstrings of Python; every line of other texts."""
    if path.suffix != ".py":
        yield from path.read_text(encoding="utf-8").splitlines()
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def private_words() -> Iterator[tuple[str, str]]:
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix in (".py", ".toml", ".html", ".js", ".css"):
            for text in texts(path):
                for match in FORBIDDEN.finditer(text):
                    line_start = text.rfind("\n", 0, match.start()) + 1
                    line_end = text.find("\n", match.end())
                    line = text[line_start : line_end if line_end >= 0 else len(text)].strip()
                    yield str(path.relative_to(PACKAGE)), line


def test_no_text_uses_a_private_word() -> None:
    excepted = set()
    found = []
    for path, line in private_words():
        exception = next((key for key in EXCEPTIONS if key[0] == path and key[1] in line), None)
        if exception is None:
            found.append(f"{path}: {line}")
        else:
            excepted.add(exception)
    assert not found, "\n".join(found)
    assert excepted == set(EXCEPTIONS), "exceptions that nothing needs any more"


def test_a_private_word_is_seen() -> None:
    """The pattern finds words in sentences and leaves names alone."""
    assert FORBIDDEN.search("Guilty is a device")
    assert FORBIDDEN.search("tells nobody.")
    assert not FORBIDDEN.search("CRATON_NURSERY_X amended untold pulsed")
