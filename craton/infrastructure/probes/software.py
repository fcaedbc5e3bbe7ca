"""Versions of a job's software stack: driver, CUDA, NCCL, EFA, kernel, and the Python packages that models use."""

from __future__ import annotations

import re
from dataclasses import dataclass

from craton.infrastructure.probes.fabric import Fabric
from craton.infrastructure.probes.gpus import Gpus
from craton.infrastructure.probes.host import Host
from craton.infrastructure.probes.root import NodeRoot

# A package has several names on the package index, depending on its CUDA version.
LIBRARIES: dict[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "triton": ("triton",),
    "flash_attn": ("flash-attn", "flash-attn-3"),
    "transformer_engine": ("transformer-engine", "transformer-engine-cu13", "transformer-engine-cu12"),
    "nixl": ("nixl", "nixl-cu13", "nixl-cu12"),
    "ucx": ("ucx-py", "ucxx", "libucx-cu13", "libucx-cu12"),
}
SHARED_OBJECTS = {"ucx": "libucp.so"}  # found without a package


@dataclass(frozen=True)
class Software:
    versions: dict[str, str]  # driver, driver_cuda, cuda, nccl, efa_installer, libfabric, kernel, ...: if known
    libraries: dict[str, str]  # torch, flash_attn, ... → version; "" where it is not installed


def probe_software(root: NodeRoot, gpus: Gpus, fabric: Fabric, host: Host) -> Software:
    packages = root.packages
    libraries = {name: _installed(packages, names) for name, names in LIBRARIES.items()}
    for name, shared in SHARED_OBJECTS.items():
        if not libraries[name] and shared in root.ask("ldconfig").text:
            libraries[name] = shared
    versions = {
        "driver": gpus.driver_version,
        "driver_cuda": gpus.cuda_version,
        "cuda": cuda_of_torch(packages),
        "nccl": _installed(packages, ("nvidia-nccl-cu13", "nvidia-nccl-cu12")) or _system_nccl(root),
        "kernel": _first(r"^(\d+\.\d+(?:\.\d+)?)", host.kernel),
        **fabric.versions,
    }
    return Software({name: version for name, version in versions.items() if version}, libraries)


def cuda_of_torch(packages: dict[str, str]) -> str:
    """Return the CUDA version that torch was built for; "" for a CPU build."""
    torch = packages.get("torch", "")
    if "+cpu" in torch or "+rocm" in torch:
        return ""
    if named := re.search(r"\+cu(\d+)(\d)", torch):
        return f"{named[1]}.{named[2]}"
    runtime = _installed(packages, ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12"))
    return _first(r"^(\d+\.\d+)", runtime) if torch else ""


def version_numbers(text: str) -> tuple[int, ...]:
    """Convert `2.27.5+cuda12.9` to (2, 27, 5) for comparison."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _installed(packages: dict[str, str], names: tuple[str, ...]) -> str:
    return next((packages[name] for name in names if packages.get(name)), "")


def _system_nccl(root: NodeRoot) -> str:
    """Return NCCL's version from its header, if installed by system packages."""
    for header in ("usr/include/nccl.h", "usr/local/cuda/include/nccl.h"):
        numbers = re.findall(r"#define NCCL_(?:MAJOR|MINOR|PATCH) (\d+)", root.read(header))
        if len(numbers) == 3:
            return ".".join(numbers)
    return ""


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""
