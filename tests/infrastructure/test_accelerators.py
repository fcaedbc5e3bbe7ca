"""`local` on a machine with GPUs is those GPUs, as nvidia-smi names them and CUDA_VISIBLE_DEVICES shows them."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from craton.infrastructure import CatalogError, resolve_cluster, visible_accelerators
from craton.infrastructure.accelerators import Accelerator, catalog_gpu
from craton.infrastructure.catalog import gpus
from craton.infrastructure.local import local_instance
from craton.job import parse_job

H200 = "{index}, GPU-{index}f00-42, NVIDIA H200, 143771"
MIB = 2.0**20


def machine_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str], status: int = 0) -> None:
    """A machine whose nvidia-smi prints these lines."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\ncat <<'END'\n" + "".join(f"{line}\n" for line in lines) + f"END\nexit {status}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def h200(count: int) -> list[str]:
    return [H200.format(index=index) for index in range(count)]


def test_local_is_the_gpus_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(tmp_path, monkeypatch, h200(8))
    job = parse_job("{kind: pretrain, model: llama-3.1-8b, train: {global_batch_sequences: 8}, cluster: local x 1}")
    cluster = resolve_cluster(job.cluster)
    assert (cluster.num_nodes, cluster.num_gpus, cluster.instance.gpu.name) == (1, 8, "H200-SXM")
    assert (cluster.instance.nvlink_domain_gpus, cluster.scheduler) == (8, "local")
    half = local_instance(2)
    assert (half.num_gpus, half.nvlink_domain_gpus) == (4, 4)
    with pytest.raises(CatalogError, match="local x 3 cannot split 8 GPUs equally; use local x 1"):
        local_instance(3)


def test_only_visible_gpus_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(tmp_path, monkeypatch, h200(4))
    for shown, indices in {"2,0": "20", "GPU-3f00": "3", "1,9,2": "1", "": "", "-1": ""}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        assert "".join(card.index for card in visible_accelerators()) == indices
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert len(visible_accelerators()) == 4


def test_a_tool_without_a_card_is_no_gpu_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(tmp_path, monkeypatch, ["NVIDIA-SMI has failed because it could not talk to the driver"], status=9)
    assert visible_accelerators() == []
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert visible_accelerators() == []


@pytest.mark.parametrize(
    ("reported", "memory_mib", "name"),
    [
        ("NVIDIA H200", 143771, "H200-SXM"),
        ("NVIDIA H100 80GB HBM3", 81559, "H100-SXM"),
        ("NVIDIA A100-SXM4-80GB", 81920, "A100-80-SXM"),
        ("NVIDIA A100-SXM4-40GB", 40960, "A100-40-SXM"),
        ("Tesla V100-SXM2-32GB", 32768, "V100-SXM"),
        *((f"NVIDIA {card}", 0, card) for card in ("B200", "GB200", "L40S", "A10G")),
    ],
)
def test_names_of_the_driver(reported: str, memory_mib: float, name: str) -> None:
    known = {card.name: card for card in gpus()}
    memory_bytes = memory_mib * MIB or known[name].memory_bytes
    assert catalog_gpu([Accelerator("0", "GPU-0", reported, memory_bytes)]).name == name


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (
            ["0, GPU-0, NVIDIA TITAN Xp, 12288"],
            r"this machine's GPU is not in the catalog \(NVIDIA TITAN Xp, 12.0 GiB\); write a",
        ),
        (["0, GPU-0, NVIDIA H200, 71885"], "this machine's GPU is not in the catalog"),  # half of one
        (["0, GPU-0, NVIDIA H200, 143771", "1, GPU-1, NVIDIA L40S, 46068"], "different GPUs .* CUDA_VISIBLE_DEVICES"),
        (["0, NVIDIA H200"], "nvidia-smi printed '0, NVIDIA H200'"),
    ],
)
def test_other_gpus_are_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str], says: str
) -> None:
    machine_with(tmp_path, monkeypatch, lines)
    with pytest.raises(CatalogError, match=says):
        local_instance()
