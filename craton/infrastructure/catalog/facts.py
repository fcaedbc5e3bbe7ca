"""Read the catalog's TOML files into entries: every number has a source and a date, every error names file and key.

A number is written `{ value = 989.5, source = "post", date = 2026-05-07 }`; a user's own file may use the bare number.
Later files override key by key, so overriding one number keeps the rest of its entry.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

from craton.infrastructure.errors import CatalogError
from craton.infrastructure.hardware import Price, PurchaseKind
from craton.nearest import did_you_mean

SHIPPED = Path(__file__).parent
SHIPPED_FILES = ("sources.toml", "gpus.toml", "instances.toml", "storage.toml")
SECTIONS = ("gpus", "instances", "host_links", "storage")


@dataclass(frozen=True)
class Key:
    """One key of an entry: its name in tables, its unit, and whether it is required."""

    title: str
    unit: str = ""  # "" with text=False: a count
    text: bool = False
    required: bool = False
    positive: bool = False  # zero makes no sense


KEYS: dict[str, dict[str, Key]] = {
    "gpus": {
        "generation": Key("generation", text=True, required=True),
        "memory_mib": Key("memory", "MiB", required=True, positive=True),
        "memory_terabytes_per_second": Key("memory bandwidth", "TB/s", required=True, positive=True),
        "fp32_tflops": Key("fp32 peak", "TFLOP/s", positive=True),
        "fp16_tflops": Key("fp16 peak, dense", "TFLOP/s", positive=True),
        "bf16_tflops": Key("bf16 peak, dense", "TFLOP/s", positive=True),
        "fp8_tflops": Key("fp8 peak, dense", "TFLOP/s", positive=True),
        "fp4_tflops": Key("fp4 peak, dense", "TFLOP/s", positive=True),
        "achievable_bf16_tflops": Key("bf16 best measured", "TFLOP/s", positive=True),
        "achievable_fp8_tflops": Key("fp8 best measured", "TFLOP/s", positive=True),
        "nvlink_gigabytes_per_second": Key("NVLink, one direction", "GB/s"),
        "power_watts": Key("power limit", "W"),
    },
    "instances": {
        "gpu": Key("GPU", text=True, required=True),
        "num_gpus": Key("GPUs", required=True, positive=True),
        "nvlink_domain_gpus": Key("NVLink domain", "GPUs", required=True, positive=True),
        "host_link": Key("host link", text=True, required=True),
        "network_gigabits_per_second": Key("network", "Gb/s", required=True),
        "network_interfaces": Key("network interfaces"),
        "efa_version": Key("EFA version"),
        "vcpus": Key("vCPUs"),
        "host_memory_gib": Key("host memory", "GiB", required=True, positive=True),
        "nvme_terabytes": Key("NVMe", "TB"),
        "nvme_read_gigabytes_per_second": Key("NVMe read", "GB/s"),
        "nvme_write_gigabytes_per_second": Key("NVMe write", "GB/s"),
    },
    "host_links": {"gigabytes_per_second": Key("one direction, per GPU", "GB/s", required=True, positive=True)},
    "storage": {
        "kind": Key("kind", text=True, required=True),
        "read_megabytes_per_second_per_tib": Key("read per TiB", "MB/s"),
        "write_megabytes_per_second_per_tib": Key("write per TiB", "MB/s"),
        "network_megabytes_per_second_per_tib": Key("served from cache per TiB", "MB/s"),
        "burst_megabytes_per_second_per_tib": Key("disk burst per TiB", "MB/s"),
        "default_capacity_tib": Key("capacity assumed", "TiB"),
        "read_gigabytes_per_second": Key("read, whole tier", "GB/s"),
        "write_gigabytes_per_second": Key("write, whole tier", "GB/s"),
        "throughput_step_megabytes_per_second": Key("sold in steps of", "MB/s"),
        "client_read_gigabytes_per_second": Key("read, one node", "GB/s"),
        "client_write_gigabytes_per_second": Key("write, one node", "GB/s"),
        "network_share": Key("share of the node's network"),
        "read_requests_per_second": Key("read requests per prefix", "1/s"),
        "write_requests_per_second": Key("write requests per prefix", "1/s"),
        "drive_read_gigabytes_per_second": Key("read, one drive", "GB/s"),
        "drive_write_gigabytes_per_second": Key("write, one drive", "GB/s"),
    },
}
PRICE_KEYS = ("kind", "dollars_per_hour", "region", "source", "date", "note")


@dataclass(frozen=True)
class Fact:
    """One number or word of the catalog with its source."""

    value: float | str
    source: str
    date: date | None
    note: str = ""


@dataclass(frozen=True)
class CatalogEntry:
    """One GPU, instance, link or storage service as the catalog writes it, in data-sheet units."""

    section: str
    name: str
    facts: Mapping[str, Fact] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    prices: tuple[Price, ...] = ()
    overridden_by: str = ""  # the user's file, where it changed something

    def number(self, key: str, default: float = 0.0) -> float:
        fact = self.facts.get(key)
        return default if fact is None else float(fact.value)

    def word(self, key: str) -> str:
        return str(self.facts[key].value)


@dataclass(frozen=True)
class Catalog:
    entries: Mapping[str, Mapping[str, CatalogEntry]]  # section → name → entry
    sources: Mapping[str, str]
    user_file: Path | None = None


def load_catalog() -> Catalog:
    """Return the shipped catalog overridden by the user's file; reloaded only when that file changes."""
    path = user_catalog_path()
    if path is None:
        return _load(None, 0, 0)
    state = path.stat()
    return _load(path, state.st_mtime_ns, state.st_size)


def user_catalog_path(environment: Mapping[str, str] = os.environ) -> Path | None:
    """`CRATON_CATALOG`, else `~/.config/craton/catalog.toml` if it exists (XDG_CONFIG_HOME is honoured)."""
    named = environment.get("CRATON_CATALOG")
    if named:
        path = Path(named).expanduser()
        if not path.is_file():
            raise CatalogError(f"CRATON_CATALOG names {path}, which is not a file; unset it or create the file")
        return path
    config = environment.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    path = Path(config) / "craton" / "catalog.toml"
    return path if path.is_file() else None


@lru_cache(maxsize=4)
def _load(user_file: Path | None, _modified_ns: int, _size: int) -> Catalog:
    catalog = Catalog(entries={section: {} for section in SECTIONS}, sources={})
    for name in SHIPPED_FILES:
        catalog = overlay(catalog, SHIPPED / name)
    if user_file is not None:
        catalog = replace(overlay(catalog, user_file, by_user=True), user_file=user_file)
    for section in SECTIONS:
        _check_spellings(catalog.entries[section])
        for entry in catalog.entries[section].values():
            _check_complete(entry, catalog)
    return catalog


def overlay(catalog: Catalog, path: Path, by_user: bool = False) -> Catalog:
    """Return the catalog overridden by one more file; pure except for reading that file."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise CatalogError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise CatalogError(f"{path}: not valid TOML: {error}") from None
    reader = _Reader(path, by_user)
    reader.check_names(document, ("sources", *SECTIONS), "")
    sources = {**catalog.sources, **reader.sources(document.get("sources", {}))}
    entries = {section: dict(catalog.entries[section]) for section in SECTIONS}
    for section in SECTIONS:
        for name, table in reader.table(document.get(section, {}), section).items():
            where = f"{section}.{name}"
            base = entries[section].get(name, CatalogEntry(section, name))
            entries[section][name] = reader.entry(base, reader.table(table, where), where, sources)
    return Catalog(entries=entries, sources=sources, user_file=catalog.user_file)


class _Reader:
    """Convert one file's tables to entries; every error names the file and the key."""

    def __init__(self, path: Path, by_user: bool) -> None:
        self.path = path
        self.by_user = by_user
        self.written = datetime.fromtimestamp(path.stat().st_mtime, tz=UTC).date()

    def fail(self, where: str, complaint: str) -> CatalogError:
        return CatalogError(f"{self.path}: {where}: {complaint}")

    def check_names(self, table: Mapping[str, Any], allowed: tuple[str, ...], where: str) -> None:
        for name in table:
            if name not in allowed:
                key = f"{where}.{name}" if where else name
                raise self.fail(key, f"unknown key; allowed: {', '.join(allowed)}{did_you_mean(name, allowed)}")

    def table(self, value: object, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.fail(where, f"must be a table, not {value!r}")
        return value

    def sources(self, table: object) -> dict[str, str]:
        result = self.table(table, "sources")
        for key, text in result.items():
            if not isinstance(text, str):
                raise self.fail(f"sources.{key}", f"must be a sentence in quotes, not {text!r}")
        return result

    def entry(self, base: CatalogEntry, table: dict[str, Any], where: str, sources: Mapping[str, str]) -> CatalogEntry:
        keys = KEYS[base.section]
        extra = ("aliases", "notes", "prices") if base.section == "instances" else ("aliases", "notes")
        self.check_names(table, (*keys, *extra), where)
        facts = {
            **base.facts,
            **{key: self.fact(table[key], keys[key], f"{where}.{key}", sources) for key in table if key in keys},
        }
        prices = self.prices(table.get("prices", []), f"{where}.prices", sources)
        kinds = {price.kind for price in prices}
        return replace(
            base,
            facts=facts,
            aliases=base.aliases + self.words(table.get("aliases", []), f"{where}.aliases"),
            notes=base.notes + self.words(table.get("notes", []), f"{where}.notes"),
            prices=tuple(price for price in base.prices if price.kind not in kinds) + prices,
            overridden_by=str(self.path) if self.by_user else "",
        )

    def words(self, value: object, where: str) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.fail(where, f"must be a list of strings, not {value!r}")
        return tuple(value)

    def fact(self, stated: object, key: Key, where: str, sources: Mapping[str, str]) -> Fact:
        written: dict[str, Any] = stated if isinstance(stated, dict) else {"value": stated}
        self.check_names(written, ("value", "source", "date", "note"), where)
        if "value" not in written:
            raise self.fail(where, "has no value; write { value = ..., source = ..., date = ... }")
        value = written["value"]
        if key.text:
            if not isinstance(value, str) or not value:
                raise self.fail(where, f"must be a word in quotes, not {value!r}")
        else:
            value = self.number(value, where, key.unit, key.positive)
        source, when = self.provenance(written, where, sources)
        return Fact(value=value, source=source, date=when, note=str(written.get("note", "")))

    def number(self, value: object, where: str, unit: str, positive: bool) -> float:
        in_unit = f" in {unit}" if unit else ""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(where, f"must be a number{in_unit}, not {value!r}")
        if not 0 <= value < float("inf") or (positive and value == 0):
            raise self.fail(
                where, f"must be a number{in_unit} {'above' if positive else 'of at least'} 0, not {value!r}"
            )
        return float(value)

    def provenance(self, written: Mapping[str, Any], where: str, sources: Mapping[str, str]) -> tuple[str, date | None]:
        """Return source text and date. The user's own file may omit both; then the file itself is the source."""
        source, when = written.get("source", ""), written.get("date")
        if isinstance(when, str):
            try:
                when = date.fromisoformat(when)
            except ValueError:
                raise self.fail(f"{where}.date", f"must be a date like 2026-05-07, not {when!r}") from None
        if when is not None and (not isinstance(when, date) or isinstance(when, datetime)):
            raise self.fail(f"{where}.date", f"must be a date like 2026-05-07, not {when!r}")
        if not isinstance(source, str):
            raise self.fail(f"{where}.source", f"must be a key of [sources] or a sentence, not {source!r}")
        if self.by_user:
            return sources.get(source, source) or str(self.path), when or self.written
        if source not in sources or when is None:
            raise self.fail(where, "needs a date and a source that is a key of [sources]")
        return sources[source], when

    def prices(self, stated: object, where: str, sources: Mapping[str, str]) -> tuple[Price, ...]:
        if not isinstance(stated, list):
            raise self.fail(where, f"must be a list of tables, not {stated!r}")
        prices = []
        for index, written in enumerate(stated):
            here = f"{where}[{index}]"
            table = self.table(written, here)
            self.check_names(table, PRICE_KEYS, here)
            kind: Any = table.get("kind")
            if kind not in get_args(PurchaseKind):
                raise self.fail(f"{here}.kind", f"must be one of {', '.join(get_args(PurchaseKind))}, not {kind!r}")
            dollars = self.number(table.get("dollars_per_hour"), f"{here}.dollars_per_hour", "dollars", positive=False)
            source, when = self.provenance(table, here, sources)
            assert when is not None
            region, note = str(table.get("region", "")), str(table.get("note", ""))
            prices.append(Price(dollars, kind, when, region, source, note))
        return tuple(prices)


def _check_spellings(entries: Mapping[str, CatalogEntry]) -> None:
    """Raise CatalogError if a name or alias belongs to two entries."""
    owners: dict[str, CatalogEntry] = {}
    for entry in entries.values():
        for spelling in {text.lower() for text in (entry.name, *entry.aliases)}:
            other = owners.setdefault(spelling, entry)
            if other is not entry:
                where = f"{entry.overridden_by or other.overridden_by or SHIPPED}: {entry.section}.{entry.name}"
                raise CatalogError(f"{where}: {spelling!r} already means {other.name}; choose another name or alias")


def _check_complete(entry: CatalogEntry, catalog: Catalog) -> None:
    """Raise CatalogError if an entry lacks a required key or refers to something that does not exist."""
    where = f"{entry.overridden_by or SHIPPED}: {entry.section}.{entry.name}"
    missing = [key for key, about in KEYS[entry.section].items() if about.required and key not in entry.facts]
    if missing:
        raise CatalogError(f"{where}: {', '.join(missing)} missing; a new entry needs all of them")
    if entry.section == "gpus" and not any(f"{name}_tflops" in entry.facts for name in ("bf16", "fp16", "fp32")):
        raise CatalogError(f"{where}: no peak FLOP/s; set bf16_tflops, fp16_tflops or fp32_tflops")
    if entry.section == "instances":
        link, links = entry.word("host_link"), catalog.entries["host_links"]
        if link not in links:
            raise CatalogError(
                f"{where}.host_link: unknown {link!r}; known: {', '.join(links)}; or add host_links.{link}"
            )
        spellings = {text.lower() for gpu in catalog.entries["gpus"].values() for text in (gpu.name, *gpu.aliases)}
        if entry.word("gpu").lower() not in spellings:
            gpus, gpu_name = catalog.entries["gpus"], entry.word("gpu")
            raise CatalogError(
                f"{where}.gpu: unknown {gpu_name!r}; known: {', '.join(gpus)}; or add gpus.{gpu_name}"
                f"{did_you_mean(gpu_name, gpus)}"
            )
