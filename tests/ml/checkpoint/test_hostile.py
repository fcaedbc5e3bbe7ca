"""A checkpoint that somebody else wrote cannot run anything, whatever it names: it gets one line, and the next copy is
read. Each attack is shown to work on Python's own unpickler first."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hostile import METADATA, archive_of, attacks, hostile_archives, inert_attacks, replace, seal
from states import equal, numbers, single
from test_export import a_run, data, decoder, save, weights  # noqa: F401 - `data` is a fixture
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, Metadata

from craton.errors import CratonError
from craton.job import parse_job
from craton.ml import export, sample
from craton.ml.serving.device import load_served
from craton.ml.training.checkpoint import CheckpointError, TierFolder, find_checkpoint
from craton.ml.training.checkpoint.archive import read_archive
from craton.ml.training.checkpoint.checksums import FileSum, Seal
from craton.ml.training.checkpoint.find import open_tier
from craton.ml.training.checkpoint.metadata import parse_metadata

FIRST, SECOND = 1, 2
SHARD = "__0_0_0.distcp"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tier with two real steps."""
    folder = tmp_path_factory.mktemp("tier")
    checkpointer = single([TierFolder("shared", folder)])
    for step in (FIRST, SECOND):
        checkpointer.save(step, numbers(step), {"next_sample": step}, wait=True)
    checkpointer.close()
    return folder


@pytest.fixture
def tier(saved: Path, tmp_path: Path) -> Path:
    """A copy of it, to be harmed."""
    folder = tmp_path / "tier"
    for step in saved.iterdir():
        (folder / step.name).mkdir(parents=True)
        for file in step.iterdir():
            (folder / step.name / file.name).write_bytes(file.read_bytes())
    return folder


def newest(tier: Path) -> Path:
    return tier / f"step-{SECOND:08d}"


def passed_over(tier: Path) -> str:
    """Why the newest step is not taken; the one before it is, and is whole."""
    checkpointer = single([TierFolder("shared", tier)])
    tensors = {name: torch.zeros_like(tensor) for name, tensor in numbers(FIRST).items()}
    with pytest.warns(UserWarning, match="step 2 cannot be used"):
        counters = checkpointer.restore(tensors, needed=("next_sample",))
    checkpointer.close()
    assert counters == {"next_sample": FIRST, "step": FIRST}
    assert equal(tensors, numbers(FIRST))
    assert checkpointer.restored is not None
    (reason,) = checkpointer.restored.passed_over
    assert "\n" not in reason
    assert reason.isprintable()
    return reason


def test_no_attack_that_python_runs_is_run_by_a_restore(tier: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    found = attacks(newest(tier), marker)
    assert len(found) > 20
    for name, attack in found.items():
        with contextlib.suppress(Exception):
            pickle.loads(attack)
        assert marker.exists(), f"{name} is no attack"
        marker.unlink()
        replace(newest(tier), METADATA, attack)
        reason = passed_over(tier)
        assert not marker.exists(), name
        assert f"{METADATA} cannot be used, and nothing in it was run" in reason, name


@pytest.mark.parametrize("name", list(inert_attacks()))
def test_what_costs_memory_or_time_or_is_no_metadata_is_passed_over(tier: Path, name: str) -> None:
    replace(newest(tier), METADATA, inert_attacks()[name])
    assert f"{METADATA} cannot be used" in passed_over(tier)


def test_the_name_that_was_asked_for_is_said_without_letters_that_a_terminal_obeys(tier: Path) -> None:
    replace(newest(tier), METADATA, b"\x80\x04\x8c\x02os\x8c\x0bsys\x1b[2Jtem\n\x93.")
    assert r"it references 'os.sys\x1b[2Jtem\n', which no checkpoint needs" in passed_over(tier)


def test_a_shard_that_holds_more_than_a_tensor_is_passed_over(tier: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    shard = (newest(tier) / SHARD).read_bytes()
    metadata: Metadata = pickle.loads((newest(tier) / METADATA).read_bytes())
    for said, archive in hostile_archives(marker).items():
        padded = bytes(max(0, 2**14 - len(archive))) + archive  # a zip file is read from its end
        for place in metadata.storage_data.values():
            place.relative_path, place.offset, place.length = SHARD, len(shard), len(padded)
        (newest(tier) / SHARD).write_bytes(shard + padded)
        replace(newest(tier), METADATA, pickle.dumps(metadata))
        reason = passed_over(tier)
        assert "cannot be read as a tensor" in reason
        assert said in reason
    assert not marker.exists()


def test_archives_of_tensors_are_read_as_torch_reads_them() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn):
        for shape in ((3, 4), (), (0, 4)):
            whole = torch.arange(24).reshape(6, 4)[: shape[0] if shape else 1].to(dtype)
            tensor = whole.T if shape else whole[0, 1]
            archive = archive_of(tensor)
            found = read_archive(io.BytesIO(archive), len(archive))
            assert (found.dtype, found.shape) == (dtype, tensor.shape)
            assert torch.equal(found.float(), tensor.float())


def _first(metadata: Metadata) -> Any:
    return next(iter(metadata.state_dict_metadata.values()))


def _place(metadata: Metadata) -> Any:
    return next(iter(metadata.storage_data.values()))


def _rename(metadata: Metadata, name: str) -> None:
    old = next(iter(metadata.state_dict_metadata))
    metadata.state_dict_metadata[name] = metadata.state_dict_metadata.pop(old)


HARMS: dict[str, tuple[Callable[[Metadata], Any], str]] = {
    "beyond the file": (lambda m: setattr(_place(m), "offset", 2**40), "which has"),
    "before the file": (lambda m: setattr(_place(m), "offset", -1), "is at bytes -1"),
    "no bytes": (lambda m: setattr(_place(m), "length", 0), "is at bytes"),
    "negative length": (lambda m: setattr(_place(m), "length", -5), "is at bytes"),
    "too short for its elements": (lambda m: setattr(_place(m), "length", 100), "100 bytes are too few for"),
    "length that is a text": (lambda m: setattr(_place(m), "length", "9"), "is at bytes"),
    "path out of the folder": (
        lambda m: setattr(_place(m), "relative_path", "../step-00000001/" + SHARD),
        "not in checksums.json",
    ),
    "absolute path": (lambda m: setattr(_place(m), "relative_path", "/etc/passwd"), "not in checksums.json"),
    "compressed": (lambda m: setattr(_place(m), "transform_descriptors", ["zstd"]), "compressed or encrypted"),
    "bytes": (
        lambda m: m.state_dict_metadata.update(x=BytesStorageMetadata()),
        "instead of torch.distributed.checkpoint.metadata.TensorStorageMetadata",
    ),
    "size without parts": (lambda m: setattr(_first(m), "size", torch.Size((2**40, 2**20))), "does not match its size"),
    "part outside": (
        lambda m: setattr(_first(m).chunks[0], "sizes", torch.Size((999, 32))),
        "is outside its size [64, 32]",
    ),
    "part of other dimensions": (lambda m: setattr(_first(m).chunks[0], "sizes", torch.Size((64,))), "is outside"),
    "no parts": (lambda m: setattr(_first(m), "chunks", []), "does not match its size"),
    "a part a thousand times": (lambda m: setattr(_first(m), "chunks", _first(m).chunks * 1000), "more tensor parts"),
    "a part in no file": (
        lambda m: setattr(_first(m), "chunks", [ChunkStorageMetadata(torch.Size((1, 0)), torch.Size((63, 32)))]),
        "in no file",
    ),
    "no dtype": (lambda m: setattr(_first(m).properties, "dtype", None), "no dtype"),
    "other dtype": (lambda m: setattr(_first(m).properties, "dtype", torch.int32), "is not the torch.int32"),
    "empty, of sizes that no tensor has": (
        lambda m: (setattr(_first(m), "size", torch.Size((2**62, 2**62, 0))), _first(m).chunks.clear()),
        "too large for a tensor",
    ),
    "negative size": (lambda m: setattr(_first(m), "size", (-1, 32)), "has no size"),
    "name for a terminal": (lambda m: _rename(m, "model.\x1b[2J"), "is not a valid tensor name"),
    "name of 10,000 letters": (lambda m: _rename(m, "a" * 10_000), "is not a valid tensor name"),
    "another class": (lambda m: setattr(_first(m), "__class__", ChunkStorageMetadata), "instead of"),
    "no places": (lambda m: setattr(m, "storage_data", None), "no list of tensors"),
}


@pytest.mark.parametrize("name", list(HARMS))
def test_metadata_that_does_not_fit_its_files_is_passed_over(tier: Path, name: str) -> None:
    harm, said = HARMS[name]
    metadata = pickle.loads((newest(tier) / METADATA).read_bytes())
    harm(metadata)
    replace(newest(tier), METADATA, pickle.dumps(metadata))
    assert said in passed_over(tier)


def test_no_change_of_a_byte_gives_anything_but_metadata_or_its_error(saved: Path) -> None:
    """Of 3,000 files with changed, cut or repeated bytes."""
    step = newest(saved)
    whole = (step / METADATA).read_bytes()
    sums = Seal.parse({name: (step / name).read_bytes() for name in ("COMPLETE", "checksums.json")}, SECOND).files
    chance = random.Random(0)
    refused = 0
    for _ in range(3000):
        content = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(content))
            kind = chance.randrange(3)
            if kind == 0:
                content[at] = chance.randrange(256)
            elif kind == 1:
                del content[at : at + chance.randint(1, 20)]
            else:
                content[at:at] = content[at : at + chance.randint(1, 40)]
        try:
            assert isinstance(parse_metadata(bytes(content), sums), Metadata)
        except CheckpointError:
            refused += 1
    assert refused > 1000


NAMES = ["../outside", "/etc/passwd", "..", ".", "", "a/b", "a\x00b", "COMPLETE", "a\nb", "x" * 300]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_a_step_is_a_plain_name(tier: Path, name: str) -> None:
    table = json.loads((newest(tier) / "checksums.json").read_bytes())
    table["files"][name] = table["files"][SHARD]
    seal(newest(tier), table)
    assert "checksums.json cannot be used" in passed_over(tier)


@pytest.mark.parametrize(
    "entry",
    [
        {"crc32": 1, "bytes": -1, "blocks": [1]},
        {"crc32": 1, "bytes": 10, "blocks": []},
        {"crc32": 1, "bytes": 10**18, "blocks": [1]},
        {"crc32": "1", "bytes": 10, "blocks": [1]},
        {"crc32": 1, "bytes": 10.0, "blocks": [1]},
        {"bytes": 10, "blocks": [1]},
        [],
        None,
    ],
)
def test_a_size_and_its_checksums_belong_together(tier: Path, entry: Any) -> None:
    table = json.loads((newest(tier) / "checksums.json").read_bytes())
    table["files"][SHARD] = entry
    seal(newest(tier), table)
    assert "checksums.json cannot be used" in passed_over(tier)


ABOUT: list[dict[str, Any]] = [
    *({"step": step} for step in (10**30, -1, 1, "2", 2.0, True, None, [])),
    *({"world": world} for world in (-3, 0, 10**30, "1", 1.5)),
    *({"tiers": tiers} for tiers in ("shared", [3], ["\x1b[2J"], ["x" * 5000], ["shared"] * 1000, None)),
    *({"counters": counters} for counters in ([], None, {"next_sample": -1}, {"next_sample": "0"}, {"step": 7})),
    *({"counters": {"records": records}} for records in ("x", [1], [{}], [{"step": 9}], [{"step": 1, "loss": []}])),
    *({"save": save} for save in (7, "", "a\nb")),
    *({"time": seconds} for seconds in ("now", float("nan"), -1)),
    {"bytes": -1},
]


@pytest.mark.parametrize("changes", ABOUT, ids=lambda changes: repr(changes)[:40])
def test_a_seal_that_says_nonsense_is_passed_over(tier: Path, changes: dict[str, Any]) -> None:
    seal(newest(tier), **changes)
    assert "COMPLETE cannot be used: it" in passed_over(tier)


def test_a_counter_that_training_needs_is_missed_in_one_line(tier: Path) -> None:
    seal(newest(tier), counters={})
    assert "COMPLETE has no counter next_sample" in passed_over(tier)


def test_a_seal_of_16_gigabytes_is_not_read(tier: Path) -> None:
    with open(newest(tier) / "COMPLETE", "r+b") as file:
        file.truncate(16 << 30)
    assert "COMPLETE has 17,179,869,184 bytes" in passed_over(tier)


def test_a_step_or_a_tier_that_is_a_link_is_not_followed(tier: Path, tmp_path: Path) -> None:
    newest(tier).rename(tmp_path / "elsewhere")
    newest(tier).symlink_to(tmp_path / "elsewhere")
    assert "step-00000002 is a symbolic link, which is not followed" in passed_over(tier)
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    inside = run / "checkpoints" / "shared"
    inside.symlink_to(tier)
    with pytest.raises(CheckpointError, match="shared is a symbolic link, which is not followed"):
        find_checkpoint([TierFolder("shared", inside, run=run)])
    with pytest.raises(CheckpointError, match="shared is a symbolic link, which is not followed"):
        open_tier(TierFolder("shared", inside, run=run)).prepare()
    with pytest.warns(UserWarning, match="step 2 cannot be used"):
        assert find_checkpoint([TierFolder("shared", inside)]).step == FIRST  # a place elsewhere may be a link


def test_a_step_is_not_written_through_a_link(tier: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tier / "step-00000003.partial").symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match="partial is a symbolic link"):
        open_tier(TierFolder("shared", tier)).write(3).begin(leads=True)
    (tier / "step-00000004.partial").mkdir()
    (tier / "step-00000004.partial" / SHARD).symlink_to(tmp_path / "new")
    with pytest.raises(OSError, match="symbolic"), open_tier(TierFolder("shared", tier)).write(4).create(SHARD):
        pass
    assert not (tmp_path / "new").exists()


def test_a_seal_that_is_nested_without_end_is_passed_over(tier: Path) -> None:
    (newest(tier) / "COMPLETE").write_text("[" * 200_000)
    assert "COMPLETE cannot be used" in passed_over(tier)


@pytest.mark.parametrize("file", [SHARD, METADATA, "checksums.json", "COMPLETE"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_regular_files_are_read(tier: Path, tmp_path: Path, file: str, kind: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    path = newest(tier) / file
    path.rename(elsewhere)
    if kind == "link":
        path.symlink_to(elsewhere)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    assert file in passed_over(tier)


def test_a_lower_tier_has_what_a_hostile_one_has_not(tier: Path, tmp_path: Path, saved: Path) -> None:
    marker = tmp_path / "marker"
    replace(newest(tier), METADATA, attacks(newest(tier), marker)["system by GLOBAL"])
    checkpointer = single([TierFolder("fast", tier), TierFolder("shared", saved)])
    tensors = {name: torch.zeros_like(tensor) for name, tensor in numbers(SECOND).items()}
    with pytest.warns(UserWarning, match=r"tier fast: step 2 cannot be used: .*it references os\.system"):
        counters = checkpointer.restore(tensors)
    checkpointer.close()
    assert counters is not None
    assert counters["step"] == SECOND
    assert equal(tensors, numbers(SECOND))
    assert not marker.exists()


def test_what_dcp_itself_writes_is_read_as_python_reads_it(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {
        str(dtype): torch.zeros(3, 2).to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    }
    tensors |= {"scalar": torch.tensor(1.0), "empty": torch.zeros(0, 4), "transposed": torch.zeros(5, 2).T}
    dcp.save(dict(tensors), checkpoint_id=tmp_path / "step", no_dist=True)
    content = (tmp_path / "step" / METADATA).read_bytes()
    sums = {path.name: FileSum(0, path.stat().st_size, ()) for path in (tmp_path / "step").iterdir()}
    ours, theirs = parse_metadata(content, sums), pickle.loads(content)
    assert theirs.storage_meta is not None
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data


def test_what_four_ranks_of_torch_2_11_wrote_is_read_as_python_reads_it() -> None:
    """The file is from such a machine: seven rows and eight columns over four ranks, beside tensors of one rank."""
    content = Path(__file__).with_name("metadata_torch_2_11.pickle").read_bytes()
    theirs: Metadata = pickle.loads(content)
    sums = {place.relative_path: FileSum(0, 2**20, ()) for place in theirs.storage_data.values()}
    ours = parse_metadata(content, sums)
    assert len(ours.state_dict_metadata["w"].chunks) == 4
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data


VERBS = ["in a tensor's size", "dotted name through pathlib", "system by GLOBAL"]


@pytest.mark.parametrize("kind", VERBS)
@pytest.mark.parametrize("verb", ["export", "adapters", "sample", "serve"])
def test_no_verb_runs_what_a_checkpoint_says(
    tmp_path: Path,
    data: Path,  # noqa: F811 - the fixture
    capsys: pytest.CaptureFixture[str],
    recwarn: pytest.WarningsRecorder,
    verb: str,
    kind: str,
) -> None:
    run = a_run(tmp_path, data)
    save(run, 4, weights(decoder(run, 1)))
    (step,) = run.checkpoints("shared").glob("step-*")
    marker = tmp_path / "marker"
    replace(step, METADATA, attacks(step, marker)[kind])
    said = ""
    if verb == "serve":
        job = parse_job(f"kind: serve\nname: s\nmodel: {run.path}\nserve: {{precision: fp32}}\ncluster: local x 1\n")
        assert job.trained_run is not None
        with pytest.raises(CratonError) as raised:
            load_served(job, torch.device("cpu"))
        said = f"error: {raised.value}\n"
    else:
        more = ["--adapters"] if verb == "adapters" else []
        main, arguments = (
            (sample.main, ["--prompt", "def "]) if verb == "sample" else (export.main, [str(tmp_path / "out"), *more])
        )
        assert main([str(run.path), *arguments]) == 2
        said = capsys.readouterr().err
    assert not marker.exists()
    assert said.count("\n") == 1
    assert f"step 4 cannot be used: {METADATA} cannot be used, and nothing in it was run" in said
    assert not [warning for warning in recwarn if "cannot be used" in str(warning.message)]


def test_an_older_step_is_exported_and_the_hostile_one_named(
    tmp_path: Path,
    data: Path,  # noqa: F811 - the fixture
) -> None:
    run = a_run(tmp_path, data)
    for step in (1, 2):
        save(run, step, weights(decoder(run, step)))
    hostile = run.checkpoints("shared") / "step-00000002"
    replace(hostile, METADATA, b"cos\nsystem\n.")
    with pytest.warns(UserWarning, match="step 2 cannot be used: .*reading step 1"):
        assert find_checkpoint([TierFolder("shared", run.checkpoints("shared"))]).step == 1
