"""Look up hardware by exact name or listed alias, ignoring case; anything else is an error with the nearest name.

Data-sheet units end here: results are in bytes, FLOPs and seconds.
"""

from __future__ import annotations

from craton.infrastructure.catalog.facts import Catalog, CatalogEntry, load_catalog
from craton.infrastructure.errors import CatalogError
from craton.infrastructure.hardware import Gpu, Instance
from craton.nearest import did_you_mean

TERA, GIGA, MEGA = 1e12, 1e9, 1e6
GIB, MIB, TIB = 2.0**30, 2.0**20, 2.0**40

PRECISIONS = ("fp32", "fp16", "bf16", "fp8", "fp4")


def gpu(name: str) -> Gpu:
    """The GPU of that name or alias."""
    return gpu_of_entry(entry("gpus", name))


def gpus() -> tuple[Gpu, ...]:
    return tuple(gpu_of_entry(item) for item in load_catalog().entries["gpus"].values())


def instance(name: str) -> Instance:
    """The instance of that name or alias (`p5en` is `p5en.48xlarge`)."""
    return instance_of_entry(entry("instances", name), load_catalog())


def instances() -> tuple[Instance, ...]:
    catalog = load_catalog()
    return tuple(instance_of_entry(item, catalog) for item in catalog.entries["instances"].values())


def entry(section: str, name: str, catalog: Catalog | None = None) -> CatalogEntry:
    """Return the catalog entry of a name or alias, with its sources; `section` is a key of KEYS."""
    entries = (catalog or load_catalog()).entries[section]
    by_spelling = {spelling.lower(): item for item in entries.values() for spelling in (*item.aliases, item.name)}
    result = by_spelling.get(name.strip().lower())
    if result is None:
        one = {"gpus": "GPU", "instances": "instance", "storage": "storage service"}.get(section, section)
        spellings = [
            spelling for known_entry in entries.values() for spelling in (known_entry.name, *known_entry.aliases)
        ]
        if section == "instances":
            spellings.append("local")  # `cluster: local x 2` is this machine
        raise CatalogError(
            f"unknown {one} {name!r}; known: {', '.join(entries)}, "
            f"or your own in ~/.config/craton/catalog.toml{did_you_mean(name, spellings)}"
        )
    return result


def gpu_of_entry(item: CatalogEntry) -> Gpu:
    return Gpu(
        name=item.name,
        generation=item.word("generation"),
        flops={name: item.number(f"{name}_tflops") * TERA for name in PRECISIONS if f"{name}_tflops" in item.facts},
        achievable_flops={
            name: item.number(f"achievable_{name}_tflops") * TERA
            for name in PRECISIONS
            if f"achievable_{name}_tflops" in item.facts
        },
        memory_bytes=item.number("memory_mib") * MIB,
        memory_bytes_per_second=item.number("memory_terabytes_per_second") * TERA,
        nvlink_bytes_per_second=item.number("nvlink_gigabytes_per_second") * GIGA,
        power_watts=item.number("power_watts"),
    )


def instance_of_entry(item: CatalogEntry, catalog: Catalog) -> Instance:
    link = item.word("host_link")
    return Instance(
        name=item.name,
        gpu=gpu_of_entry(entry("gpus", item.word("gpu"), catalog)),
        num_gpus=int(item.number("num_gpus")),
        nvlink_domain_gpus=int(item.number("nvlink_domain_gpus")),
        host_link=link,
        host_link_bytes_per_second=catalog.entries["host_links"][link].number("gigabytes_per_second") * GIGA,
        network_bytes_per_second=item.number("network_gigabits_per_second") * GIGA / 8,
        network_interfaces=int(item.number("network_interfaces")),
        efa_version=int(item.number("efa_version")),
        vcpus=int(item.number("vcpus")),
        host_memory_bytes=item.number("host_memory_gib") * GIB,
        nvme_bytes=item.number("nvme_terabytes") * TERA,
        nvme_read_bytes_per_second=item.number("nvme_read_gigabytes_per_second") * GIGA,
        nvme_write_bytes_per_second=item.number("nvme_write_gigabytes_per_second") * GIGA,
        prices=item.prices,
        notes=item.notes,
    )
