"""`craton validate`: one line for a good job, one clear line for each problem of a bad one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from craton.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"

JOB = """\
kind: pretrain
model: llama-3.1-8b
data: {sequence: 8192}
train: {global_batch_sequences: 64, steps: 10}
cluster: p5.48xlarge x 8
"""

LOCAL = """\
kind: pretrain
model: {{layers: 1, hidden: 32, heads: 2, ffn_hidden: 32, vocab: 300}}
data: {{path: {path}, tokenizer: "bpe:300", sequence: 16}}
train: {{global_batch_sequences: 6, steps: 40}}
cluster: local x 1
"""

BAD = {
    "duplicate key": (JOB + "kind: sft\n").encode(),
    "tab": JOB.encode() + b"layout:\n\ttp: 8\n",
    "empty": b"",
    "10 MB": JOB.encode() + b"#" * 10_000_000,
    "bomb": b"a: &a [lol, lol]\nb: &b [*a, *a, *a]\nc: [*b, *b, *b]\n",
    "not UTF-8": JOB.encode() + b"name: caf\xe9\n",
    "list": b"- kind: pretrain\n",
    "unknown key": JOB.replace("data:", "dta:").encode(),
    "unknown instance": JOB.replace("p5.48xlarge", "p5.84xlarge").encode(),
    "impossible layout": (JOB + "layout: {fsdp: 1, tp: 64}\n").encode(),
    "layout that cannot be filled": (JOB + "layout: {tp: 3}\n").encode(),
}


class Command:
    """Runs the command in this process, as the console script does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch = monkeypatch
        self.capsys = capsys

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        self.monkeypatch.setattr(sys, "argv", ["craton", "validate", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        output = self.capsys.readouterr()
        return int(caught.value.code or 0), output.out, output.err


@pytest.fixture
def validate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.stem)
def test_examples_are_valid(validate: Command, file: Path) -> None:
    code, output, errors = validate(file)
    assert (code, errors) == (0, "")
    assert output.startswith(f"ok: {file.stem} (")
    assert output.count("\n") == 1


def test_the_line_says_model_cluster_batch_and_layout(validate: Command, tmp_path: Path) -> None:
    file = tmp_path / "my-job.yaml"
    file.write_text(JOB + "layout: {tp: 8}\n")
    assert validate(file)[1] == (
        "ok: my-job (pretrain) · llama-3.1-8b, 8.03B parameters · p5.48xlarge x 8 = 64 GPUs · "
        "64 sequences of 8,192 = 524k tokens per step · 10 steps, 5.24M tokens · "
        "layout fsdp 8 · tp 8 · micro_batch 1 · recompute none · bf16\n"
    )
    read = json.loads(validate(file, "--json")[1])
    assert read["ok"] is True
    assert (read["num_gpus"], read["parameters"], read["steps"]) == (64, 8_030_261_248, 10)


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_line_and_exit_code_2(validate: Command, tmp_path: Path, case: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes(BAD[case])
    code, output, errors = validate(file, "--json")
    assert code == 2
    assert errors.startswith(f"error: {file}:")
    assert errors.count("\n") == 1
    assert f"error: {json.loads(output)['error']}\n" == errors


@pytest.mark.parametrize(
    ("job", "layout", "line"),
    [
        (JOB, "{tp: 16}", "`layout: {fsdp: 8, tp: 8}`"),
        (JOB, "{tp: 3}", "`layout: {fsdp: 16, tp: 4}`"),
        (JOB.replace("llama-3.1-8b", "my.models:build"), "{tp: 2}", "write layout: {fsdp: 64}"),
    ],
)
def test_a_layout_that_cannot_be_trained_names_the_nearest_that_can(
    validate: Command, tmp_path: Path, job: str, layout: str, line: str
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(job + f"layout: {layout}\n")
    code, _, errors = validate(file)
    assert code == 2
    assert line in errors


def test_another_stack_may_copy_key_value_heads(validate: Command, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(JOB + "layout: {tp: 16}\nsoftware: megatron-lm\n")
    assert validate(file)[0] == 0


def test_a_file_with_several_problems_lists_them(validate: Command, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(JOB.replace("pretrain", "pretrian").replace("steps", "stpes"))
    code, output, errors = validate(file)
    assert (code, output) == (2, "")
    assert [line.split(": ")[1] for line in errors.splitlines()] == [f"{file}:1", f"{file}:4"]


def test_a_directory_and_a_missing_file(validate: Command, tmp_path: Path) -> None:
    assert validate(tmp_path) == (2, "", f"error: {tmp_path}: is a directory; give the YAML file in it\n")
    assert validate(tmp_path / "x.yaml")[0] == 2


def test_a_local_job_is_checked_without_measuring_the_machine(
    validate: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "local x 2 = 2 ranks" in validate(EXAMPLES / "quickstart.yaml")[1]
    assert list(tmp_path.iterdir()) == []


def test_data_without_text_is_refused_by_its_beginning(validate: Command, tmp_path: Path) -> None:
    for name, content in {
        "program": b"\x7fELF\x02\x01\0\0" * 100,
        "zeros.txt": b"text\0",
        "latin.txt": "café".encode("latin-1"),
        "lines.jsonl": b"no JSON\n",
        "other.jsonl": b'{"body": "text"}\n',
        "torn.parquet": b"PAR1 and no more",
        "torn.txt.gz": b"no gzip",
        "empty.txt": b"",
    }.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"\xff\xd8\xff")
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "latin.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "good" / "text.txt").write_bytes(b"x" * 65535 + "é".encode())  # cut within a character
    wrong = {
        "program": "is not text (a zero byte at 6)",
        "zeros.txt": "is not text (a zero byte at 4)",
        "latin.txt": "is not UTF-8 text (byte 0xe9 at 3)",
        "lines.jsonl": "is not JSON",
        "other.jsonl": "has no field 'text'; its fields are 'body'",
        "torn.parquet": "cannot be read as Parquet",
        "torn.txt.gz": "cannot be read",
        "empty.txt": "contains no text",
        "photos": "contains no text",
    }
    job = tmp_path / "job.yaml"
    for name in (*wrong, "good"):
        job.write_text(LOCAL.format(path=tmp_path / name))
        code, output, errors = validate(job)
        if name == "good":
            assert (code, errors) == (0, "")
            continue
        assert (code, output) == (2, ""), name
        assert errors.startswith(f"error: {job}:3: data.path: {tmp_path / name}")
        assert wrong[name] in errors
        assert "; allowed: UTF-8 text files (.txt" in errors
        assert errors.count("\n") == 1
