"""`craton catalog`: show the catalog of GPUs, instances, storage, models and this machine, with sources."""

from __future__ import annotations

import json as json_module
import sys
from dataclasses import asdict, dataclass, field
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from craton.formatting import count, percent

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from craton.infrastructure import Instance, Price
    from craton.infrastructure.catalog import CatalogEntry
    from craton.job.model import ModelShape

SECTIONS = ("gpus", "instances", "storage", "models", "local")
PRICE_TITLES = {"on-demand": "on-demand", "capacity-block": "block", "spot": "spot", "own": "own"}
GIB = 2.0**30


@dataclass
class Grid:
    """A table before it is fitted to a terminal; a column that begins with > holds numbers."""

    header: str  # column | column
    rows: list[list[str]] = field(default_factory=list)
    title: str | None = None
    droppable: tuple[str, ...] = ()  # columns to drop first on a narrow terminal, in this order

    @property
    def columns(self) -> list[str]:
        return self.header.split(" | ")

    def add(self, *cells: str) -> None:
        assert len(cells) == len(self.columns)
        self.rows.append(list(cells))


Parts = list[Grid | str]


def catalog(
    section: Annotated[
        str | None,
        typer.Argument(
            help="Section (gpus, instances, storage, models or local), or the name of an entry \\[default: overview]."
        ),
    ] = None,
    name: Annotated[str | None, typer.Argument(help="Entry to show, with the source and date of every number.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="With local: measure this machine again.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the entries as JSON.")] = False,
) -> None:
    """Show GPUs, instances with prices, storage and models, and this machine as measured."""
    section, name = _find(section, name)
    if measure and section != "local":
        from craton.infrastructure import CatalogError

        raise CatalogError("--measure requires the section local: `craton catalog local --measure`")
    if section is None:
        document, parts = _overview()
    elif section == "local":
        document, parts = _local(measure)
    elif section == "models":
        document, parts = _models() if name is None else _model(name)
    elif name is not None:
        document, parts = _entry(section, name)
    else:
        document, parts = {"gpus": _gpus, "instances": _instances, "storage": _storage}[section]()
    if json:
        print(json_module.dumps(document, indent=2, default=str))
    else:
        _show(parts)


def _find(section: str | None, name: str | None) -> tuple[str | None, str | None]:
    """Return section and name; find an entry such as `p5en` in any section."""
    if section is None or section in SECTIONS:
        return section, name
    from craton.infrastructure import CatalogError
    from craton.infrastructure.catalog import load_catalog
    from craton.job.model import model_preset, model_presets
    from craton.nearest import did_you_mean

    sections = ", ".join(SECTIONS)
    if name is not None:
        raise CatalogError(f"unknown section {section!r}; allowed: {sections}{did_you_mean(section, SECTIONS)}")
    spellings: list[str] = [*SECTIONS, *model_presets()]
    for kind in ("instances", "gpus", "storage"):
        for entry in load_catalog().entries[kind].values():
            own = (entry.name, *entry.aliases)
            if section.lower() in {spelling.lower() for spelling in own}:
                return kind, entry.name
            spellings += own
    try:
        return "models", model_preset(section).name
    except ValueError:
        near = did_you_mean(section, spellings)
        raise CatalogError(f"the catalog has no entry {section!r}; sections: {sections}{near}") from None


def _overview() -> tuple[Any, Parts]:
    from craton.infrastructure.catalog import load_catalog
    from craton.job.model import model_presets

    loaded = load_catalog()
    names = {kind: list(loaded.entries[kind]) for kind in ("gpus", "instances", "storage")}
    names["models"] = list(model_presets())
    grid = Grid("section | >entries | names")
    for kind, members in names.items():
        grid.add(kind, str(len(members)), ", ".join(members))
    grid.add("local", "1", "this machine, measured once and cached")
    entries = [entry for section in loaded.entries.values() for entry in section.values()]
    changed = [f"{entry.section}.{entry.name}" for entry in entries if entry.overridden_by]
    if loaded.user_file:
        yours = f"Your file {loaded.user_file} sets {', '.join(changed) or 'nothing'}."
    else:
        yours = "Add or override entries in ~/.config/craton/catalog.toml, or in the file that CRATON_CATALOG names."
    document = {**names, "local": ["local"], "user_file": str(loaded.user_file or ""), "overridden": changed}
    more = "`craton catalog SECTION` lists one section, `craton catalog NAME` shows an entry with its sources."
    return document, [grid, more, yours]


def _gpus() -> tuple[Any, Parts]:
    from craton.infrastructure.catalog import gpus, load_catalog

    grid = Grid(
        "GPU | generation | >memory\nGiB | >memory\nTB/s | >bf16\nTFLOP/s | >fp8\nTFLOP/s | >fp4\nTFLOP/s | "
        ">bf16 best\nmeasured | >NVLink\nGB/s | >power\nW",
        droppable=(">power\nW", "generation", ">fp4\nTFLOP/s"),
    )
    for gpu in gpus():
        half = gpu.flops.get("bf16") or gpu.flops.get("fp16")
        grid.add(
            gpu.name,
            gpu.generation,
            f"{gpu.memory_bytes / GIB:.1f}",
            f"{gpu.memory_bytes_per_second / 1e12:.2f}",
            _number(half, 1e12) + ("" if "bf16" in gpu.flops else " fp16"),
            _number(gpu.flops.get("fp8"), 1e12),
            _number(gpu.flops.get("fp4"), 1e12),
            _number(gpu.achievable_flops.get("bf16"), 1e12),
            _number(gpu.nvlink_bytes_per_second, 1e9),
            _number(gpu.power_watts, 1),
        )
    note = "Peaks without sparsity; memory as the driver reports it; NVLink in one direction."
    return [_document(entry) for entry in load_catalog().entries["gpus"].values()], [grid, note]


def _instances() -> tuple[Any, Parts]:
    from craton.infrastructure.catalog import instances, load_catalog

    listed = instances()
    own = any(price.kind == "own" for instance in listed for price in instance.prices)
    kinds = [kind for kind in PRICE_TITLES if own or kind != "own"]
    grid = Grid(
        "instance | GPUs | >memory\nGiB/GPU | >NVLink\ndomain | >network\nGb/s | >per GPU\nGB/s | EFA | host\nlink | "
        ">host\nGiB | >NVMe\nTB | " + " | ".join(f">{PRICE_TITLES[kind]}\n$/h" for kind in kinds),
        droppable=("host\nlink", ">host\nGiB", ">NVMe\nTB", ">per GPU\nGB/s", "EFA", ">memory\nGiB/GPU"),
    )
    today = date.today()
    for instance in listed:
        prices: dict[str, Price] = {price.kind: price for price in instance.prices}
        grid.add(
            instance.name,
            f"{instance.num_gpus} x {instance.gpu.name}",
            f"{instance.gpu.memory_bytes / GIB:.1f}",
            str(instance.nvlink_domain_gpus) if instance.nvlink_domain_gpus > 1 else "-",
            _number(instance.network_bytes_per_second * 8, 1e9),
            _number(instance.network_bytes_per_second / instance.num_gpus, 1e9),
            f"v{instance.efa_version} x {instance.network_interfaces}" if instance.efa_version else "-",
            instance.host_link,
            _number(instance.host_memory_bytes, GIB),
            _number(instance.nvme_bytes, 1e12),
            *(_price_cell(prices.get(kind), today) for kind in kinds),
        )
    note = "$/h is one instance; block is an EC2 capacity block, spot the median over zones."
    document = [_document(entry) for entry in load_catalog().entries["instances"].values()]
    return document, [grid, note, *_price_dates(listed, today)]


def _price_cell(price: Price | None, today: date) -> str:
    return "-" if price is None else f"{price.dollars_per_hour:,.2f}{_old_mark(price, today)}"


def _old_mark(price: Price, today: date, word: str = "") -> str:
    from craton.infrastructure import STALE_PRICE_DAYS, price_age_days

    return f" †{word}" if price_age_days(price, today) > STALE_PRICE_DAYS else ""


def _price_dates(instances: tuple[Instance, ...], today: date) -> list[str]:
    """Return one line per purchase kind: the dates of its prices, and which are too old to trust."""
    from craton.infrastructure import price_age_days

    lines = []
    for kind, title in PRICE_TITLES.items():
        by_date = {price.date: price for instance in instances for price in instance.prices if price.kind == kind}
        dates = [
            f"{price.date} ({price_age_days(price, today)} days ago{_old_mark(price, today, ' old')})"
            for _, price in sorted(by_date.items(), reverse=True)
        ]
        if dates:
            lines.append(f"{title} prices of {', '.join(dates)}")
    return lines


def _storage() -> tuple[Any, Parts]:
    from craton.infrastructure.catalog import load_catalog

    grid = Grid(
        "storage | kind | >read\nMB/s per TiB | >write\nMB/s per TiB | >read\nGB/s | >write\nGB/s | "
        ">node reads\nGB/s | >node writes\nGB/s | >requests/s\nread / write",
        droppable=(">requests/s\nread / write", "kind"),
    )
    entries = list(load_catalog().entries["storage"].values())
    for entry in entries:
        requests = [_fact(entry, f"{direction}_requests_per_second") for direction in ("read", "write")]
        grid.add(
            entry.name,
            entry.word("kind"),
            _fact(entry, "read_megabytes_per_second_per_tib"),
            _fact(entry, "write_megabytes_per_second_per_tib"),
            _fact(entry, "read_gigabytes_per_second"),
            _fact(entry, "write_gigabytes_per_second"),
            _node_rate(entry, "read"),
            _node_rate(entry, "write"),
            "-" if requests[0] == "-" else " / ".join(requests),
        )
    notes: Parts = [
        "An instance's NVMe throughput is shown with the instance: drives x the rate of one drive.",
        "A plan without a file system assumes fsx-persistent-2-1000 and s3; set yours in the cluster file.",
    ]
    return [_document(entry) for entry in entries], [grid, *notes]


def _node_rate(entry: CatalogEntry, direction: str) -> str:
    """Return the throughput of one node, in the form the catalog has it."""
    if "network_share" in entry.facts:
        return f"{percent(entry.number('network_share'))} of network"
    drive = f"drive_{direction}_gigabytes_per_second"
    return (
        f"{_fact(entry, drive)} per drive" if drive in entry.facts else _fact(entry, drive.replace("drive", "client"))
    )


def _entry(section: str, name: str) -> tuple[Any, Parts]:
    from craton.infrastructure.catalog import KEYS, entry

    shown = entry(section, name)
    sources: dict[str, int] = {}
    grid = Grid("what | >value | unit | >source | of | note", title=shown.name)
    for key, about in KEYS[section].items():
        fact = shown.facts.get(key)
        if fact is not None:
            value = str(fact.value) if about.text else _plain(float(fact.value))
            number = sources.setdefault(fact.source, len(sources) + 1)
            grid.add(about.title, value, about.unit, str(number), str(fact.date), fact.note)
    parts: Parts = [grid]
    if shown.prices:
        parts.append(_prices(shown.prices, sources))
    parts += [f"note: {note}" for note in shown.notes]
    parts += [f"source {number}: {source}" for source, number in sources.items()]
    if shown.aliases:
        parts.append(f"also called: {', '.join(shown.aliases)}")
    if shown.overridden_by:
        parts.append(f"set partly or fully by {shown.overridden_by}")
    return _document(shown), parts


def _prices(prices: tuple[Price, ...], sources: dict[str, int]) -> Grid:
    from craton.infrastructure import price_age_days

    grid = Grid("price | >$/h | region | >source | of | >days ago | note")
    today = date.today()
    for price in prices:
        number = sources.setdefault(price.source, len(sources) + 1)
        age = f"{price_age_days(price, today)}{_old_mark(price, today, ' old')}"
        dollars = f"{price.dollars_per_hour:,.2f}"
        grid.add(price.kind, dollars, price.region, str(number), str(price.date), age, price.note)
    return grid


def _models() -> tuple[Any, Parts]:
    from craton.job.model import model_presets

    grid = Grid(
        "model | >layers | >hidden | >heads\n/ kv | >experts\n/ top k | >vocabulary | >parameters | >active | source",
        droppable=("source", ">vocabulary"),
    )
    shapes = list(model_presets().values())
    for shape in shapes:
        grid.add(
            shape.name,
            str(shape.layers),
            f"{shape.hidden:,}",
            f"{shape.heads} / {shape.kv_heads}" if shape.mla is None else f"{shape.heads} / mla",
            f"{shape.experts} / {shape.top_k}" if shape.is_moe else "-",
            f"{shape.vocab:,}",
            count(shape.parameters),
            count(shape.active_parameters) if shape.is_moe else "all",
            shape.source,
        )
    return [_model_document(shape) for shape in shapes], [grid]


def _model(name: str) -> tuple[Any, Parts]:
    from craton.job.model import model_preset

    shape = model_preset(name)
    document = _model_document(shape)
    grid = Grid("what | >value", title=shape.name)
    for key, value in document.items():
        if isinstance(value, dict):
            for part, number in value.items():
                grid.add(f"{key} {part}".replace("_", " "), f"{number:,}")
        elif key not in ("name", "source") and value:
            grid.add(key.replace("_", " "), "yes" if value is True else f"{value:,}")
    return document, [grid, f"source: {shape.source}"]


def _model_document(shape: ModelShape) -> dict[str, Any]:
    return {**asdict(shape), "parameters": shape.parameters, "active_parameters": shape.active_parameters}


def _local(measure: bool) -> tuple[Any, Parts]:
    from craton.infrastructure import cache_path, local_machine

    machine = local_machine(again=measure)
    measured = machine.measurement
    days = machine.age_days(datetime.now(UTC))
    grid = Grid("what | >value | unit | how", title="local")
    grid.add("processor", machine.cpu, "", "")
    grid.add("cores", str(machine.cores), "", "usable by this process")
    grid.add("memory", f"{machine.memory_bytes / GIB:.1f}", "GiB", "of the machine or its container")
    for name, flops, method in (
        ("fp32", measured.fp32_flops, measured.fp32_method),
        ("bf16", measured.bf16_flops, measured.bf16_method),
    ):
        grid.add(name, f"{flops / 1e9:,.{0 if flops >= 1e10 else 2}f}", "GFLOP/s", method)
    grid.add("memory copy", f"{measured.memory_bytes_per_second / 1e9:.1f}", "GB/s", "read and written, all cores")
    grid.add("loopback", f"{measured.loopback_bytes_per_second / 1e9:.2f}", "GB/s", "one TCP connection")
    if (host := measured.host) is not None:
        micro = 1e6
        each = f"{host.operation_seconds * micro:.1f} and {host.backward_operation_seconds * micro:.1f}"
        grid.add("operation", each, "µs", "on a tiny tensor, forward and backward")
        grid.add("exponential", f"{host.exponential_seconds * 1e9:.2f}", "ns", "one element, one thread")
        grid.add("optimizer", f"{host.tensor_seconds * micro:.1f}", "µs", "per tensor")
        grid.add("loop", f"{host.loop_seconds * micro:.0f}", "µs", "rows of tokens and one record")
        grid.add("collective", f"{host.collective_seconds * micro:.0f}", "µs", "gloo, 4 kB between two processes")
        grid.add("collective", f"{host.collective_bytes_per_second / 1e9:.2f}", "GB/s", "gloo, sent by one process")
    load = f"{measured.load_average:.1f}"
    grid.add("load", load, "", "busy during the measurement: the rates are low" if machine.was_busy else "idle enough")
    grid.add("measured", f"{machine.measured_at:%Y-%m-%d %H:%M}", "UTC", f"{days} days ago" if days else "today")
    document = {
        "cpu": machine.cpu,
        "cores": machine.cores,
        "memory_bytes": machine.memory_bytes,
        **asdict(measured),
        "measured_at": machine.measured_at.isoformat(),
        "cache": str(cache_path()),
    }
    return document, [grid, f"Cached in {cache_path()}; `craton catalog local --measure` measures again."]


def _document(entry: CatalogEntry) -> dict[str, Any]:
    from craton.infrastructure.catalog import KEYS

    units = KEYS[entry.section]
    return {
        "name": entry.name,
        "aliases": list(entry.aliases),
        "facts": {key: {**asdict(fact), "unit": units[key].unit} for key, fact in entry.facts.items()},
        "prices": [asdict(price) for price in entry.prices],
        "notes": list(entry.notes),
        "overridden_by": entry.overridden_by,
    }


def _show(parts: Parts) -> None:
    from rich.console import Console
    from rich.text import Text

    # A pipe has no width: rich would assume 80 columns and break the tables.
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    for part in parts:
        if isinstance(part, str):
            console.print(Text(part), soft_wrap=not sys.stdout.isatty())
            continue
        table, dropped = _fit(part, console)
        console.print(table)
        if dropped:
            names = ", ".join(column.lstrip(">").replace("\n", " ") for column in dropped)
            console.print(f"The terminal is too narrow for {names}; widen it or use --json.")


def _fit(grid: Grid, console: Console) -> tuple[Table, list[str]]:
    """Return the table with as many columns as fit the terminal, and the dropped columns."""
    unlimited = console.options.update(width=10_000)
    for num_dropped in range(len(grid.droppable) + 1):
        dropped = list(grid.droppable[:num_dropped])
        table = _table(grid, dropped)
        if console.measure(table, options=unlimited).maximum <= console.width:
            return table, dropped
    return table, dropped


def _table(grid: Grid, dropped: list[str]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=grid.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    kept = [index for index, column in enumerate(grid.columns) if column not in dropped]
    for index in kept:
        column = grid.columns[index]
        numeric = column.startswith(">")
        table.add_column(column.lstrip(">"), justify="right" if numeric else "left", no_wrap=numeric or index == 0)
    for row in grid.rows:
        cells = [Text(row[index]) for index in kept]  # not markup: a user's note may hold brackets
        for cell in cells:
            cell.highlight_regex("†.*", "yellow")
        table.add_row(*cells)
    return table


def _fact(entry: CatalogEntry, key: str) -> str:
    return _plain(entry.number(key)) if key in entry.facts else "-"


def _number(value: float | None, scale: float) -> str:
    return _plain(value / scale) if value else "-"


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:,.4g}"
