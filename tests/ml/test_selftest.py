"""The self-tests: results are the same from run to run, a wrong one is counted, and the slow one of a gang is named."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gang import Gang
from listeners import LOOPBACK, children, listeners_of

from craton.ml.selftest import bandwidth, compute
from craton.ml.selftest.pairs import next_pairs, slow_pairs, suspects

CPU = torch.device("cpu")


@pytest.mark.slow
def test_results_are_the_same_from_run_to_run() -> None:
    first, again = (compute.check_device(CPU, 0.05) for _ in range(2))
    assert first.error == ""
    assert first.hashes == again.hashes
    assert set(first.hashes) == {"matmul_bf16", "matmul_fp32", "attention_bf16"}
    assert set(first.mismatches.values()) == {0}
    assert all(count > 0 for count in first.repeats.values())
    assert first.wrong == []
    assert all(rate > 0 for rate in first.tflops.values())


def test_different_inputs_have_different_hashes() -> None:
    numbers = torch.ones(4)
    assert compute.result_hash(numbers) == compute.result_hash(numbers.clone())
    assert compute.result_hash(numbers) != compute.result_hash(torch.tensor([1.0, 1.0, 1.0, 1.0000001]))
    assert compute.result_hash(torch.tensor([0.0])) != compute.result_hash(torch.tensor([-0.0]))
    broken = torch.tensor([float("nan")])
    assert compute.result_hash(broken) == compute.result_hash(broken.clone())


def test_a_bit_that_flips_now_and_then_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def flaky() -> torch.Tensor:
        nonlocal calls
        calls += 1
        result = torch.ones(8)
        if calls % 5 == 0:
            result[3] = 1.0000001
        return result

    monkeypatch.setattr(compute, "operations", lambda device: {"flaky": compute.Operation(flaky, 1.0)})
    found = compute.check_device(CPU, 0.02)
    assert found.mismatches["flaky"] == pytest.approx(found.repeats["flaky"] / 5, abs=1)


def test_a_result_that_is_always_wrong_is_told_by_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.eye(16)

    def work(scale: float) -> dict[str, compute.Operation]:
        return {"matmul": compute.Operation(lambda: right * scale, 1.0, lambda: right[: compute.CHECKED_ROWS].double())}

    for scale, wrong in ((1.0, []), (1.5, ["matmul"]), (float("nan"), ["matmul"])):
        monkeypatch.setattr(compute, "operations", lambda device, scale=scale: work(scale))
        assert compute.check_device(CPU, 0.01).wrong == wrong


def test_what_the_device_raises_is_part_of_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> torch.Tensor:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nmore")

    monkeypatch.setattr(compute, "operations", lambda device: {"broken": compute.Operation(fail, 1.0)})
    assert compute.check_device(CPU, 0.01).error == "CUDA error: uncorrectable ECC error encountered"


def test_a_card_that_does_not_even_tell_its_name_is_part_of_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(device: torch.device) -> str:
        raise RuntimeError("CUDA error: device not ready")

    monkeypatch.setattr(compute, "device_name", lost)
    assert compute.check_device(CPU, 0.01).error == "CUDA error: device not ready"


def rounds_of(units: int, bad: set[int]) -> list[dict[tuple[int, int], float]]:
    """What would be measured, and how it goes on, with these units being slow."""
    rounds: list[dict[tuple[int, int], float]] = []
    while pairs := next_pairs(rounds, units):
        used = [unit for pair in pairs for unit in pair]
        assert len(used) == len(set(used))  # all at the same time
        rounds.append({pair: 1.0 if bad & set(pair) else 10.0 for pair in pairs})
        assert len(rounds) <= 4
    return rounds


@pytest.mark.parametrize("units", [3, 4, 5, 8, 16, 31, 64])
def test_one_bad_unit_is_found_wherever_it_is(units: int) -> None:
    for bad in range(units):
        assert suspects(rounds_of(units, {bad}), units) == [bad], (units, bad)


@pytest.mark.parametrize("bad", [{0, 1}, {2, 3}, {1, 2}, {0, 7}, {0, 4}])
def test_two_bad_units_are_found(bad: set[int]) -> None:
    assert set(suspects(rounds_of(8, bad), 8)) == bad


def test_a_bad_path_is_nobodys_fault() -> None:
    rounds = [{(0, 1): 1.0, (2, 3): 10.0}, {(1, 2): 10.0, (0, 3): 10.0}]
    assert suspects(rounds, 4) == []
    assert slow_pairs(rounds) == {(0, 1)}


def test_all_good_needs_two_rounds_and_one_alone_none() -> None:
    assert len(rounds_of(8, set())) == 2
    assert len(rounds_of(2, set())) == 1
    assert rounds_of(1, set()) == []
    assert slow_pairs([{(0, 1): 5.0}], expected=10.0) == {(0, 1)}  # slow by the curve, whatever the others do


def measure_with_a_slow_rank(slow: int) -> dict[str, Any] | None:
    """On a rank of the gang: one of them takes its time before every collective."""
    real = dist.all_reduce

    def late(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.02)
        return real(*arguments, **options)

    if dist.get_rank() == slow:
        dist.all_reduce = late
    try:
        return bandwidth._measure(dist.get_rank(), 1, 1.0, 0.0, CPU)
    finally:
        dist.all_reduce = real


@pytest.mark.slow
def test_the_rank_that_is_late_is_named(gang: Gang) -> None:
    found, *others = gang.run(measure_with_a_slow_rank, 2, ranks=4)
    assert others == [None] * 3
    assert found["slow_units"] == [2]
    assert {tuple(pair) for pair in found["slow_pairs"]} >= {(2, 3), (1, 2)}
    assert (found["backend"], found["size_bytes"], len(found["names"])) == ("gloo", 2**20, 4)


def test_the_place_of_a_rank_comes_from_torchrun_or_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit, match="start with srun or torchrun"):
        bandwidth.place()
    for name, value in (("SLURM_PROCID", "9"), ("SLURM_NTASKS", "16"), ("SLURM_LOCALID", "1")):
        monkeypatch.setenv(name, value)
    assert bandwidth.place() == (9, 16, 1)
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "3")):
        monkeypatch.setenv(name, value)
    assert bandwidth.place() == (3, 4, 3)


@pytest.mark.slow
def test_pairs_of_this_machine_are_measured_by_processes() -> None:
    """What `craton doctor --bandwidth` does here: four processes of its own."""
    from craton.orchestration.preflight import check_bandwidth
    from craton.orchestration.preflight.selftest import run_bandwidth

    seen: set[tuple[str, int]] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.05):
            seen.update(listeners_of(children()))

    watch = threading.Thread(target=look)
    watch.start()
    try:
        found, failed = run_bandwidth(0)
    finally:
        over.set()
        watch.join()
    assert failed == []
    assert seen
    assert {address for address, _ in seen} <= LOOPBACK, seen
    assert found is not None
    assert len(found["names"]) == 4
    assert [len(one) for one in found["rounds"]][:2] == [2, 2]
    (finding, *_) = check_bandwidth(found)
    assert "B/s" in finding.evidence
