"""Published runs become cases or are skipped with a reason; no row, however broken, is lost or ends the reading."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from craton.errors import CratonError
from craton.infrastructure.catalog import gpu
from craton.planning.calibration import Case, Skipped, find_profile, load_cases, predict
from craton.planning.calibration.cases import CaseFileError, family_of, machine_of, precision_of, sharding_of
from craton.planning.calibration.published_rows import case_terms, corpus_path

ROWS: list[dict[str, Any]] = json.loads(Path(corpus_path()).read_text(encoding="utf-8"))["cases"]
BY_ID = {row["id"]: row for row in ROWS}
DENSE = "mosaic-a100_40gb-mpt70b-s2048-128g-mb4-bf16"
MOE = "mbridge-26.08-gb200-dsv3-pretrain-256g-mxfp8-gbs4096"

Read = Callable[..., tuple[list[Case], list[Skipped]]]


@cache
def shipped() -> tuple[list[Case], list[Skipped]]:
    return load_cases(corpus_path())


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def read(*rows: object) -> tuple[list[Case], list[Skipped]]:
        path = tmp_path / "cases.json"
        path.write_text(json.dumps(rows))
        return load_cases(path)

    return read


def changed(identity: str, *changes: tuple[str, object]) -> dict[str, Any]:
    """A published row with fields replaced: ("model.layers", 3)."""
    row = copy.deepcopy(BY_ID[identity])
    for path, value in changes:
        *parents, last = path.split(".")
        place = row
        for key in parents:
            place = place[key]
        place[last] = value
    return row


def test_the_shipped_file_is_read_whole() -> None:
    cases, skipped = shipped()
    assert (len(cases), len(skipped)) == (479, 69)
    assert {case.id for case in cases} | {entry.id for entry in skipped} == set(BY_ID)
    assert all(entry.reason and not entry.reason.startswith("malformed") for entry in skipped)


def test_at_most_5_percent_of_quality_a_and_b_are_skipped() -> None:
    cases, skipped = shipped()
    lost = [entry for entry in skipped if entry.quality in ("A", "B")]
    kept = [case for case in cases if case.quality in ("A", "B")]
    assert len(lost) / (len(lost) + len(kept)) <= 0.05
    assert not [case for case in cases if case.quality == "C"]  # rows without a step time or an architecture


def test_published_step_times_agree_with_published_throughput() -> None:
    """Two ways to the same number: a mistake in units or in who counts tokens would show here."""
    checked = 0
    for case in shipped()[0]:
        rate = BY_ID[case.id]["measured"].get("tokens_per_s_per_gpu")
        if rate:
            tokens = case.global_batch_sequences * case.sequence
            assert case.measured_step_seconds == pytest.approx(tokens / rate / case.machine.num_gpus, rel=0.05), case.id
            checked += 1
    assert checked > 300


def test_every_case_has_as_many_ranks_as_gpus_and_whole_micro_batches() -> None:
    for case in shipped()[0]:
        assert case.layout.world == case.machine.num_gpus, case.id
        assert case.global_batch_sequences % (case.layout.data_parallel * case.layout.micro_batch) == 0, case.id


def test_a_dense_row(read: Read) -> None:
    (case,), skipped = read(BY_ID[DENSE])
    assert not skipped
    assert case.group == ("llm-foundry", "A100-40-SXM", "MPT-70b")
    assert (case.shape.layers, case.shape.hidden, case.shape.gated_mlp, case.shape.tied_embeddings) == (
        80,
        8192,
        False,
        True,
    )
    assert str(case.layout) == "fsdp 128 · micro_batch 4 · recompute full · bf16"
    # 1,600 Gb/s a node of 8 GPUs
    assert (case.machine.nvlink_domain, case.machine.nic_bytes_per_second) == (8, 25e9)
    assert (case.kind, case.quality, case.open_fields) == ("dense", "A", ())


def test_a_moe_row(read: Read) -> None:
    (case,), _ = read(BY_ID[MOE])
    assert case.group == ("megatron-bridge", "GB200", "DeepSeek-V3 671B")
    assert case.shape.mla is not None
    assert (case.shape.experts, case.shape.top_k, case.shape.dense_layers, case.shape.mtp_layers) == (256, 8, 3, 1)
    assert (case.layout.ep, case.layout.vpp, case.layout.schedule, case.layout.precision) == (
        64,
        4,
        "interleaved",
        "mxfp8",
    )
    assert case.machine.nvlink_domain == 72
    assert case.release == "26.08"
    assert case.measured_step_seconds == 13.342


def test_a_missing_step_time_comes_from_the_throughput(read: Read) -> None:
    row = changed(DENSE, ("derived", None), ("measured.step_time_s", None))
    (case,), _ = read(row)
    assert case.measured_step_seconds == pytest.approx(512 * 2048 / (376 * 128))


@pytest.mark.parametrize(
    ("identity", "dispatcher", "fused"),
    [
        ("mbridge-25.09-gb200-dsv3-pretrain-256g-mxfp832elementgranularitynote-gbs2048", "nccl", False),
        ("mbridge-26.04.01-gb200-dsv3-pretrain-256g-mxfp8-gbs4096", "hybridep", False),
        ("mbridge-26.06-gb200-dsv3-pretrain-256g-mxfp8-gbs4096", "hybridep", True),
        ("mbridge-26.06.01-gb200-gpt_oss_120b-pretrain-64g-mxfp8-gbs1280", "hybridep", False),  # a noted regression
        ("mbridge-26.06-b300-dsv3-pretrain-256g-mxfp8-gbs4096", "deepep", False),  # no rack
    ],
)
def test_a_feature_starts_with_the_release_that_introduced_it(
    read: Read, identity: str, dispatcher: str, fused: bool
) -> None:
    (row,) = [row for row in ROWS if row["id"].startswith(identity)]
    ((case,), _) = read(row)
    assert (case.traits.dispatcher, case.traits.fused_experts) == (dispatcher, fused)


def test_the_first_megatron_checkpointed_every_layer_and_fused_nothing(read: Read) -> None:
    rows = [row for row in ROWS if row["framework"] in ("Megatron-LM (2020)", "Megatron-LM (2021)")]
    cases, _ = read(*rows)
    assert {case.layout.recompute for case in cases} == {"full"}
    assert {case.traits.compiled for case in cases if "megatron20-" in case.id} == {False}
    assert {case.traits.compiled for case in cases if "megatron21-" in case.id} == {True}


def test_families_of_the_shipped_file() -> None:
    counts = Counter(case.family for case in shipped()[0])
    assert counts == {
        "megatron-bridge": 167,
        "llm-foundry": 153,
        "aws-awsome": 33,
        "nemo": 26,
        "torchtitan": 24,
        "kempnerforge": 19,
        "nanotron": 19,
        "megatron-lm": 16,
        "narayanan-2021": 7,
        "nemo-automodel": 7,
        "korthikanti-2022": 4,
        "fms-fsdp": 4,
    }


@pytest.mark.parametrize(
    ("source", "family"),
    [
        ("Megatron-Bridge docs/performance-summary.md @ 067f987df03b, section 26.08", "megatron-bridge"),
        ("NeMo AutoModel docs/performance-summary.md", "nemo-automodel"),
        ("NeMo 24.09 performance", "nemo"),
        ("MOSAICML/LLM-FOUNDRY scripts/train", "llm-foundry"),
        ("A Stranger's Blog, 2026 (page 3)", "a-stranger-s-blog-2026-page-3"),
        ("", "unknown"),
    ],
)
def test_family_of_a_source(source: str, family: str) -> None:
    assert family_of(source) == family


def test_releases_of_one_publisher_are_one_family() -> None:
    sources = {row["source"].split(" section ")[-1] for row in ROWS if row["source"].startswith("Megatron-Bridge")}
    assert len(sources) > 3
    assert {family_of(row["source"]) for row in ROWS if row["source"].startswith("Megatron-Bridge")} == {
        "megatron-bridge"
    }


@pytest.mark.parametrize(
    ("text", "dp", "sharding"),
    [
        ("fsdp full_shard (zero-3)", 16, (1, 16, 3)),
        ("hsdp", 32, (4, 8, 3)),
        ("zero-1 (distributed optimizer)", 16, (1, 16, 1)),
        ("fsdp shard_grad_op", 16, (1, 16, 2)),
        ("ddp", 16, (16, 1, 3)),
        ("", 16, (1, 16, 1)),
        ("fsdp", 1, (1, 1, 3)),
    ],
)
def test_sharding_words(text: str, dp: int, sharding: tuple[int, int, int]) -> None:
    assert sharding_of(text, dp) == sharding


def test_precision_words() -> None:
    spellings = {"FP8 (current scaling)": "fp8", "MXFP8": "mxfp8", "bf16 (MP mode PURE)": "bf16", "NVFP4": "nvfp4"}
    assert {text: precision_of(text) for text in spellings} == spellings
    with pytest.raises(ValueError, match="int4"):
        precision_of("int4")


@pytest.mark.parametrize(
    ("label", "memory", "name"),
    [
        ("H100-SXM", 80, "H100-SXM"),
        ("H100 (96 GB, 500 W)", 96, "H100-SXM-96-500W"),
        ("NVIDIA GB300", None, "GB300"),
        ("A100-SXM", 40, "A100-40-SXM"),
        ("A100-SXM", 80, "A100-80-SXM"),
    ],
)
def test_gpu_names(label: str, memory: int | None, name: str) -> None:
    assert machine_of({"gpu": label, "gpu_memory_gb": memory, "num_gpus": 8}).gpu == name


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ([("hardware.gpu", "TPU v5p")], "GPU TPU v5p is not in the catalog"),
        ([("hardware.gpu", None)], "GPU not stated is not in the catalog"),
        ([("hardware", None)], "GPU not stated"),
        ([("hardware.num_gpus", None)], "number of GPUs not stated"),
        ([("hardware.num_gpus", 64)], "layout as printed gives 128 ranks, the row has 64 GPUs"),
        ([("parallelism.tp", 2)], "layout as printed gives 256 ranks, the row has 128 GPUs"),
        ([("parallelism.pp", 3)], "layout as printed gives 384 ranks, the row has 128 GPUs"),
        ([("parallelism.cp", 2)], "layout as printed gives 256 ranks, the row has 128 GPUs"),
        ([("parallelism", None)], "layout not stated"),
        ([("parallelism.dp", None)], "layout not stated"),
        ([("global_batch", 500)], "global batch 500 is not a multiple of dp 128 x micro-batch 4"),
        ([("micro_batch", None), ("global_batch", 500)], "global batch 500 is not a multiple of dp 128"),
        ([("global_batch", None)], "global batch not stated"),
        ([("seq_len", 0)], "sequence length not stated"),
        ([("model.hidden", None)], "architecture of MPT-70b not stated: hidden"),
        ([("model", {})], "architecture of unnamed not stated: layers, hidden, heads, ffn_hidden"),
        ([("model.attention", "MLA")], "latent attention of MPT-70b without its ranks"),
        ([("precision", "int4")], "precision int4 is not known"),
        ([("measured", None), ("derived", None)], "no step time and no throughput published"),
    ],
)
def test_rows_that_cannot_be_represented_say_why(read: Read, changes: list[tuple[str, object]], reason: str) -> None:
    cases, skipped = read(changed(DENSE, *changes), BY_ID[MOE])
    assert [case.id for case in cases] == [MOE]
    assert skipped[0].id == DENSE
    assert reason in skipped[0].reason


@pytest.mark.parametrize(
    "change",
    [
        ("derived.step_time_s", -1.0),
        ("derived.step_time_s", math.nan),
        ("derived.step_time_s", math.inf),
        ("derived.step_time_s", 10**400),
        ("derived.step_time_s", "fast"),
        ("measured", "fast"),
        ("hardware", [1]),
        ("hardware.gpus_per_node", 0.5),
        ("hardware.num_gpus", -128),
        ("hardware.inter_node_gbps_per_node", -1600),
        ("hardware.inter_node_gbps_per_node", "1600"),
        ("global_batch", math.inf),
        ("seq_len", math.inf),
        ("seq_len", -2048),
        ("micro_batch", 0.5),
        ("micro_batch", -4),
        ("parallelism.ep", -2),
        ("parallelism.virtual_pp", -1),
        ("model.layers", -3),
        ("model.heads", 0.5),
        ("model.vocab", -5),
        ("model.hidden", 10**400),
        ("model.experts", 8),  # experts without their width and without how many a token visits
    ],
    ids=lambda change: f"{change[0]} = {str(change[1])[:12]}",
)
def test_impossible_numbers_are_skipped_with_a_reason(read: Read, change: tuple[str, object]) -> None:
    cases, skipped = read(changed(DENSE, change))
    assert not cases
    assert skipped[0].reason


def test_latent_attention_with_a_word_for_a_number_is_skipped(read: Read) -> None:
    cases, skipped = read(changed(MOE, ("model.mla.qk_nope", "wide")))
    assert not cases
    assert skipped[0].reason


FIXTURE = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]  # the file is written anew by every example
SAMPLE = [row for row in ROWS[::40] if row["quality"] != "C"]
JUNK = st.sampled_from([None, 0, -1, 0.5, 7, math.inf, math.nan, True, "", "8", "x", [], [1], {}, {"a": 1}])


@st.composite
def broken_rows(draw: st.DrawFn) -> dict[str, Any]:
    """A published row with one to three fields, nested ones too, deleted or replaced by something silly."""
    row: dict[str, Any] = copy.deepcopy(draw(st.sampled_from(SAMPLE)))
    for _ in range(draw(st.integers(1, 3))):
        places = [row, *(value for value in row.values() if isinstance(value, dict) and value)]
        place = draw(st.sampled_from(places))
        key = draw(st.sampled_from(sorted(place)))
        if draw(st.booleans()):
            del place[key]
        else:
            place[key] = draw(JUNK)
        if not row:
            break
    return row


@settings(max_examples=120, suppress_health_check=FIXTURE)
@given(row=broken_rows())
def test_a_broken_row_is_a_case_or_a_reason(read: Read, row: dict[str, Any]) -> None:
    cases, skipped = read(row)
    assert len(cases) + len(skipped) == 1
    for entry in skipped:
        assert entry.reason
    for case in cases:
        assert 0 < case.measured_step_seconds < math.inf
        sizes = (case.machine.num_gpus, case.sequence, case.global_batch_sequences, case.shape.layers, case.layout.ep)
        assert min(sizes) >= 1
        assert case.layout.world == case.machine.num_gpus


@settings(max_examples=40, suppress_health_check=FIXTURE)
@given(row=broken_rows())
def test_what_is_read_can_be_predicted(read: Read, row: dict[str, Any]) -> None:
    """A case that was accepted never ends the benchmark later."""
    for case in read(row)[0]:
        step = predict(find_profile("craton", gpu(case.machine.gpu)), case_terms(case))
        assert 0 < step.low < step.seconds < step.high < math.inf


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("kind: pretrain", "not JSON"),
        ("[]", "expected a list of runs"),
        ("{}", "expected a list of runs"),
        ('{"cases": {}}', "expected a list of runs"),
        ('{"cases": []}', "expected a list of runs"),
        ("3", "expected a list of runs"),
        ("null", "expected a list of runs"),
        ("[1]", "run 1 is int, expected an object"),
        ("[" * 100_000, "cases.json"),
    ],
    ids=lambda text: text[:20],
)
def test_files_that_hold_no_runs(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cases.json"
    path.write_text(text)
    with pytest.raises(CaseFileError, match=message) as caught:
        load_cases(path)
    assert str(caught.value).startswith(str(path))
    assert isinstance(caught.value, CratonError)


def test_a_missing_file_a_folder_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "nothing.json", tmp_path, binary):
        with pytest.raises(CaseFileError, match=path.name):
            load_cases(path)


def test_a_list_at_the_top_and_runs_without_an_id(read: Read) -> None:
    row = changed(DENSE)
    del row["id"]
    cases, skipped = read(row, {})
    assert [case.id for case in cases] == ["run-1"]
    assert [entry.id for entry in skipped] == ["run-2"]
