"""Every remedy names keys, verbs and tools that exist for the job, the scheduler and the hardware of the run."""

from __future__ import annotations

import re
import string
import tomllib
import types
import typing
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import typer
from pydantic import BaseModel

from craton.cli.app import app
from craton.job import Job
from craton.observability.diagnosis.sentences import chosen_action
from craton.observability.diagnosis.tables import Cause, causes
from craton.observability.diagnosis.traits import (
    ADAPTERS,
    DATA,
    HARDWARE,
    KINDS,
    SCHEDULERS,
    STOPS,
    TRAINING_KINDS,
    TRAITS,
    holds,
)

WORDS = {
    "node": "node-1",
    "drain": "drain node-1",
    "who": "rank 3",
    "logs": "craton logs job --rank 3",
    "run": "job",
    "source": "mine:rows",
    "objective": "mine:loss",
    "detail": "mine.py:7",
}
# Words of an action, and the traits without which they are wrong.
ONLY_WITH = {
    r"GPU|nvidia-smi|DCGM|NVLink|NVSwitch|SXID|\bXID\b|NCCL|nccl|fabric manager|cuda": ["gpu"],
    r"run\.partition|run\.qos|run\.reservation|run\.account|sinfo|scontrol|squeue": ["slurm"],
    r"\bpod|kubectl|emptyDir|run\.queue|run\.priority|run\.namespace": ["kubernetes"],
    r"placement|\bleaf\b|EFA|efa|Lustre|run\.time_limit": ["slurm|kubernetes"],
    r"loader processes|data loader": ["command"],
    r"train\.|layout\.|checkpoint\.|data\.(?!source)": ["training"],
    r"serve\.|KV cache": ["serve"],
    r"mine:rows": ["function"],
    r"\biperf3\b": ["slurm|kubernetes"],
}
# There is no such key, or a name was not filled in.
NEVER = re.compile(r"(?<!rollout\.)(?<!verify\.)\bworkers\b|NVMe|\{(?!within)")
TOOLS = {
    "py-spy dump",
    "py-spy dump --pid",
    "kill -CONT",
    "torch.profiler",
    "iperf3",
    "nvidia-smi",
    "chrony",
    "ss -ltnp",
}
QUOTED = (
    "craton ",
    "{",
    "train.",
    "kill -CONT",
    "docker unpause",
    "nvidia-smi",
    "ss -",
    "ulimit -",
    "ip -s link",
    "scontrol resume",
    "lslocks",
    "py-spy",
)


def combinations() -> Iterator[frozenset[str]]:
    for hardware, on, kind in product(HARDWARE, SCHEDULERS, KINDS):
        for data in (*DATA, ""):
            if kind in TRAINING_KINDS:
                for policy, adapters in product((STOPS, ""), (ADAPTERS, "")):
                    yield frozenset({hardware, on, kind, "training", data, policy, adapters} - {""})
        if kind not in TRAINING_KINDS:
            yield frozenset({hardware, on, kind})


def texts_of(cause: Cause) -> list[str]:
    return [cause.action, *(action for _, action in cause.variants)]


def texts() -> Iterator[tuple[str, str]]:
    for cause in causes().values():
        for text in texts_of(cause):
            yield cause.name, text
    rules = Path("craton/observability/prometheus/rules")
    for path in sorted(rules.glob("*.toml")):
        for alert in tomllib.loads(path.read_text(encoding="utf-8")).get("alert", ()):
            yield alert["name"], f"{alert['summary']} {alert['description']}"
    for path in sorted(Path("docs/runbooks").glob("*.md")):
        yield path.name, path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(causes()))
def test_an_action_is_true_wherever_its_cause_can_occur(name: str) -> None:
    cause = causes()[name]
    possible = [traits for traits in combinations() if holds(cause.needs, traits)]
    assert possible, f"{cause.needs} never holds"
    used = set()
    for traits in possible:
        template = chosen_action(cause, traits)
        used.add(template)
        text = template.format(**WORDS)
        assert not NEVER.search(text), (sorted(traits), text)
        for words, needed in ONLY_WITH.items():
            found = re.search(words, text)
            assert found is None or holds(needed, traits), (sorted(traits), found[0] if found else "", text)
    assert used >= {action for _, action in cause.variants}, "a variant that no run gets"


def test_variants_name_traits_and_placeholders_that_exist() -> None:
    for cause in causes().values():
        named = {one for when, _ in (*cause.variants, (cause.needs, "")) for item in when for one in item.split("|")}
        assert named <= set(TRAITS), cause.name
        for text in texts_of(cause):
            fields = {name for _, name, _, _ in string.Formatter().parse(text) if name}
            assert fields <= WORDS.keys(), (cause.name, fields)


def sections() -> dict[str, type[BaseModel]]:
    """Return the keys of a job that are sections themselves."""

    def section_in(kind: object) -> type[BaseModel] | None:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
        is_union = typing.get_origin(kind) in (types.UnionType, typing.Union, typing.Annotated)
        return next((found for item in typing.get_args(kind) if is_union and (found := section_in(item))), None)

    return {name: found for name, field in Job.model_fields.items() if (found := section_in(field.annotation))}


def test_every_key_of_a_job_in_an_action_exists() -> None:
    known = sections()
    assert {"train", "data", "layout", "serve", "checkpoint", "run"} <= known.keys()
    key = re.compile(rf"(?<![\w./-])({'|'.join(known)})\.([a-z_]+)\b(?![/(])(?!\.(toml|py|json|yaml|md))")
    found = [(name, section, field) for name, text in texts() for section, field, *_ in key.findall(text)]
    assert len(found) > 20
    wrong = [entry for entry in found if entry[2] not in known[entry[1]].model_fields]
    assert not wrong


def test_every_verb_and_option_in_an_action_exists() -> None:
    command = typer.main.get_command(app)
    number = 0
    for name, text in texts():
        for quoted in re.findall(r"`(craton [^`]*)`", text):
            number += 1
            words = quoted.replace("{run}", "RUN").split()[1:]
            at = command
            while words and hasattr(at, "commands") and words[0] in at.commands:
                at = at.commands[words.pop(0)]
            assert at is not command, f"{name}: `{quoted}` names no verb"
            options = {option for parameter in at.params for option in parameter.opts}
            asked = {word.partition("=")[0] for word in words if word.startswith("--")}
            assert asked <= options | {"--help"}, f"{name}: `{quoted}`: {sorted(asked - options)} do not exist"
    assert number > 20


def test_every_other_tool_in_an_action_is_known() -> None:
    for cause in causes().values():
        for text in texts_of(cause):
            quoted = re.findall(r"`([^`]+)`", text)
            unknown = [words for words in quoted if not words.startswith(QUOTED)]
            assert not unknown, (cause.name, unknown)
            tools = re.findall(r"py-spy [a-z -]+[a-z]|torch\.\w+|\biperf3\b|\bchrony\b", text)
            assert set(tools) <= TOOLS, (cause.name, tools)
