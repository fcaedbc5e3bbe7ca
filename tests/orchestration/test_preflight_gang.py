"""What pre-flight makes of nodes together: hashes and speeds of all cards, and bandwidth between every two nodes."""

from __future__ import annotations

from typing import Any

import pytest

from craton.orchestration.preflight import check_bandwidth, check_compute


def device(number: int, **changed: Any) -> dict[str, Any]:
    healthy = {
        "device": f"cuda:{number}",
        "name": "NVIDIA H200",
        "torch": "2.11.0",
        "cuda": "13.0",
        "hashes": {"matmul_bf16": "aa" * 32, "attention_bf16": "bb" * 32},
        "repeats": {"matmul_bf16": 1000, "attention_bf16": 1000},
        "mismatches": {"matmul_bf16": 0, "attention_bf16": 0},
        "wrong": [],
        "tflops": {"matmul_bf16": 700.0},
        "seconds": 20.0,
        "error": "",
    }
    return {**healthy, **changed}


def test_cards_that_agree_are_fine() -> None:
    (finding,) = check_compute({f"g{node}": [device(number) for number in range(8)] for node in range(4)})
    assert (finding.severity, "32 devices" in finding.evidence) == ("ok", True)


def test_the_odd_one_out_is_named() -> None:
    gang = {f"g{node}": [device(number) for number in range(8)] for node in range(4)}
    gang["g2"][5]["hashes"] = {"matmul_bf16": "ee" * 32, "attention_bf16": "bb" * 32}
    (finding,) = check_compute(gang)
    assert (finding.severity, finding.node) == ("fail", "g2")
    assert "cuda:5 of g2: matmul_bf16 differs from 31 others" in finding.evidence


def test_two_that_disagree_have_no_majority() -> None:
    gang = {"g1": [device(0)], "g2": [device(0, hashes={"matmul_bf16": "ee" * 32, "attention_bf16": "bb" * 32})]}
    (finding,) = check_compute(gang)
    assert (finding.severity, "no majority" in finding.evidence, finding.node) == ("fail", True, "")


def test_other_cards_or_another_torch_are_not_compared() -> None:
    other = {"matmul_bf16": "ee" * 32, "attention_bf16": "ff" * 32}
    gang = {"g1": [device(0)], "g2": [device(0, name="NVIDIA B200", hashes=other)]}
    assert [finding.severity for finding in check_compute(gang)] == ["ok"]


@pytest.mark.parametrize(
    ("changed", "evidence"),
    [
        (
            {"mismatches": {"matmul_bf16": 3, "attention_bf16": 0}},
            "matmul_bf16 gave a different result 3 of 1,000 times",
        ),
        ({"wrong": ["matmul_bf16"]}, "far from the CPU's result"),
        ({"error": "CUDA error: an illegal instruction was encountered"}, "illegal instruction"),
    ],
)
def test_a_card_that_disagrees_with_itself_is_named(changed: dict[str, Any], evidence: str) -> None:
    (finding,) = check_compute({"g1": [device(0), device(1, **changed), device(2)]})
    assert (finding.severity, finding.node, evidence in finding.evidence) == ("fail", "g1", True)
    assert "cuda:1" in finding.evidence


def test_a_slow_card_is_named() -> None:
    right, finding = check_compute({"g1": [device(0), device(1, tflops={"matmul_bf16": 500.0}), device(2)]})
    assert right.severity == "ok"  # it computes right, only slowly
    assert (finding.what, finding.severity) == ("compute_speed", "warn")
    assert "cuda:1 of g1: matmul_bf16 at 500 TFLOP/s, the others at 700" in finding.evidence


def measured(rates: dict[tuple[int, int], float], slow: list[int], expected: float = 0.0) -> dict[str, Any]:
    units = max(max(pair) for pair in rates) + 1
    return {
        "backend": "nccl",
        "names": [f"g{unit}" for unit in range(units)],
        "expected_bytes_per_second": expected,
        "rounds": [[{"pair": list(pair), "bytes_per_second": rate} for pair, rate in rates.items()]],
        "slow_pairs": [list(pair) for pair, rate in rates.items() if rate < 100e9],
        "slow_units": slow,
    }


def test_the_slow_node_is_named_against_the_measured_curve() -> None:
    rates = {(0, 1): 20e9, (2, 3): 180e9, (1, 2): 181e9, (0, 3): 21e9}
    (finding,) = check_bandwidth(measured(rates, [0], expected=176e9))
    assert (finding.severity, finding.node) == ("fail", "g0")
    assert "g0 is slow with all others: 20.0 GB/s with g1, 21.0 GB/s with g3" in finding.evidence
    assert "expected 176 GB/s" in finding.evidence


def test_a_bad_path_is_not_a_bad_node() -> None:
    (finding,) = check_bandwidth(measured({(0, 1): 20e9, (2, 3): 180e9, (1, 2): 181e9, (0, 3): 179e9}, []))
    assert (finding.severity, "the path between them is slow" in finding.remedy) == ("warn", True)


def test_all_slow_is_told_by_the_curve_alone() -> None:
    rates = {(0, 1): 20e9, (2, 3): 21e9, (1, 2): 20e9, (0, 3): 20e9}
    (finding,) = check_bandwidth(measured(rates, [0, 1, 2, 3], expected=176e9))
    assert (finding.severity, "all pairs are slow" in finding.evidence) == ("fail", True)
    assert check_bandwidth(measured(dict.fromkeys(rates, 200000000000.0), []))[0].severity == "ok"
