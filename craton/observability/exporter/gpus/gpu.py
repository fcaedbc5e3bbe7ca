"""GPU metrics from the driver under DCGM's names, with the labels of the run and rank that use each GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from craton.infrastructure.probes import NodeRoot, probe_gpus, recovery_action
from craton.observability.exporter.collector import Collector, reason
from craton.observability.exporter.exposition import Sample
from craton.observability.exporter.families import FAMILIES
from craton.observability.exporter.gpus.cards import Card, CardLostError, Cards, NoDriverError
from craton.observability.exporter.gpus.nvml import HELD_FIELDS
from craton.observability.exporter.gpus.occupants import NO_OCCUPANT, GpuHolding, Occupant, Occupants
from craton.observability.exporter.gpus.recorded_cards import REASON_BITS

LIST_SECONDS = 30.0  # between two scans for added or removed GPUs
RETRY_SECONDS = 60.0  # before a driver that did not answer is opened again
DRIVER = "proc/driver/nvidia/version"  # exists while the driver's kernel module is loaded
BUS_LABEL = 2  # index of the PCI bus ID in a GPU's labels
WANTED_ACTIONS = ("reset", "reboot")
# nvmlDeviceGpuRecoveryAction_t, in nvidia-smi's words, which the XID table uses
RECOVERY_WORDS = ("None", "Reset", "Reboot", "Drain P2P", "Drain and Reset", "Recover IMEX Domain", "Reset", "Reboot")

_FROM_NVML = [family for family in FAMILIES.values() if family.nvml]


class CardLabels:
    """The GPUs of the node and the labels of their series, as last seen; shared with the XID collector."""

    def __init__(self, host: str) -> None:
        self._host = host
        self.cards: tuple[Card, ...] = ()
        self.lost: tuple[Card, ...] = ()  # listed before, now missing
        self.are_known = threading.Event()  # set as well when no driver can list them
        self._occupants: dict[str, Occupant] = {}

    def update(self, cards: Sequence[Card]) -> None:
        """Set the GPUs that the driver lists now. Earlier ones stay known: log lines about a GPU that fell off the bus
        must keep the labels of its series."""
        gone = {card.short_bus_id: card for card in (*self.lost, *self.cards)}
        uuids, places = {card.uuid for card in cards}, {card.short_bus_id for card in cards}
        self.lost = tuple(card for place, card in gone.items() if card.uuid not in uuids and place not in places)
        self.cards = tuple(cards)

    def occupy(self, occupants: Mapping[str, Occupant]) -> None:
        """Set the occupant of each GPU, by its UUID."""
        self._occupants = dict(occupants)
        self.are_known.set()

    @property
    def known(self) -> tuple[Card, ...]:
        return (*self.cards, *self.lost)

    def of(self, card: Card) -> tuple[str, ...]:
        who = self._occupants.get(card.uuid, NO_OCCUPANT)
        device = f"nvidia{card.minor}"
        place = (str(card.index), card.uuid, card.bus_id, device, card.name, self._host)
        return (*place, who.run, who.rank, who.hpc_job)

    def unknown(self, bus_id: str) -> tuple[str, ...]:
        """Return the labels of a GPU that the driver never listed: only its bus ID is known."""
        return ("", "", f"0000{bus_id}.0".upper(), "", "", self._host, "", "", "")

    def at(self, bus_id: str) -> tuple[str, ...]:
        """Return the labels for a bus address of the kernel log, 0000:53:00."""
        match = next((card for card in self.known if card.short_bus_id == bus_id), None)
        return self.of(match) if match else self.unknown(bus_id)


class CardSource:
    """The driver, opened again every minute while it does not answer. Until then `cards` is None and `problem` has the
    reason, unless GPU metrics are off."""

    def __init__(self, open_cards: Callable[[], Cards] | None) -> None:
        self._open = open_cards
        self._tried = float("-inf")
        self.cards: Cards | None = None
        self.problem = ""
        self.is_without_driver = False  # as NVML reports

    def get(self, now: float) -> Cards | None:
        if self.cards is None and self._open is not None and now - self._tried >= RETRY_SECONDS:
            self._tried = now
            self.is_without_driver = False
            try:
                self.cards = self._open()
            except Exception as error:  # noqa: BLE001 - missing package, library and driver raise different classes
                self.problem = reason(error)
                self.is_without_driver = isinstance(error, NoDriverError)
        return self.cards

    def close(self) -> None:
        if self.cards is not None:
            self.cards.close()
            self.cards = None


class GpuCollector(Collector):
    name = "gpu"

    def __init__(self, root: NodeRoot, source: CardSource, labels: CardLabels, occupants: Occupants) -> None:
        self._root, self._source, self._labels, self._occupants = root, source, labels, occupants
        self._holding = GpuHolding()
        self._cards: Sequence[Card] = ()
        self._on_bus = 0
        self._listed = float("-inf")

    def collect(self, now: float) -> Iterator[Sample]:
        cards = self._source.get(now)
        is_time = now - self._listed >= LIST_SECONDS
        if is_time:
            self._on_bus = len(probe_gpus(NodeRoot(self._root.path, files_only=True)).on_bus)
            self._listed = now
        if self._on_bus or cards is not None:
            yield "craton_gpus_on_bus", (), self._on_bus
        if cards is None:
            if is_time and self._on_bus and self._source.problem:
                self.errors += 1
                self.say(self._source.problem)
            # In a container without the driver's devices, NVML reports the same for a healthy driver.
            if self._source.is_without_driver and not self._root.exists(DRIVER):
                yield "craton_gpus_seen", (), 0
            self._labels.are_known.set()
            return
        if is_time:
            self._cards = cards.list()
            self._labels.update(self._cards)
        yield "craton_gpus_seen", (), len(self._cards)
        yield from self._ranks(cards, now)
        for card in self._cards:
            labels = self._labels.of(card)
            try:
                reading = cards.read(card)
            except CardLostError as error:
                self.errors += 1
                self.say(reason(error))
                self._listed = float("-inf")  # list the GPUs again at once
                yield "craton_gpu_up", labels, 0
                continue
            yield "craton_gpu_up", labels, 1
            yield from card_samples(reading, labels)

    def close(self) -> None:
        self._source.close()

    def _ranks(self, cards: Cards, now: float) -> Iterator[Sample]:
        """Find the ranks on each GPU, for the labels of its series, and yield a sample per rank."""
        shared, alive = {}, []
        for card in self._cards:
            memory: dict[Occupant, int] = {}
            for process in cards.processes(card):
                alive.append(process.pid)
                who = self._occupants.of(process.pid, now)
                memory[who] = memory.get(who, 0) + process.memory_bytes
            shared[card.uuid] = self._holding.labels(card.uuid, list(memory), now)
            for who, used in memory.items():
                row = (str(card.index), card.uuid, who.run, who.rank, who.run_node, who.hpc_job)
                yield "craton_gpu_rank_memory_bytes", row, used
        for card in self._labels.lost:
            shared[card.uuid] = self._holding.labels(card.uuid, [], now)
        self._occupants.forget(alive)
        self._labels.occupy(shared)


def card_samples(reading: Mapping[str, float], labels: tuple[str, ...]) -> Iterator[Sample]:
    """Yield the samples of one GPU, in the units of the families."""
    for family in _FROM_NVML:
        value = reading.get(family.nvml)
        if value is not None:
            yield family.name, labels, value * family.scale
    mask = reading.get("clocks_event_reasons")
    if mask is not None:
        for reason, bit in REASON_BITS.items():
            yield "craton_gpu_clocks_held", (*labels, reason), int(bool(int(mask) & bit))
    for reason, field in HELD_FIELDS.items():
        if (nanoseconds := reading.get(f"field.{field}")) is not None:
            yield "craton_gpu_clocks_held_seconds_total", (*labels, reason), nanoseconds / 1e9
    action = reading.get("field.GET_GPU_RECOVERY_ACTION")
    if action is not None:
        yield from wanted_samples(wanted_action(int(action)), labels)


def wanted_action(number: int) -> str:
    """Return Craton's action for NVML's number; an unknown, newer number also requires an action."""
    word = RECOVERY_WORDS[number] if 0 <= number < len(RECOVERY_WORDS) else "unknown action"
    return recovery_action(word)


def wanted_samples(action: str, labels: tuple[str, ...]) -> Iterator[Sample]:
    for item in WANTED_ACTIONS:
        yield "craton_gpu_recovery_wanted", (*labels, item), int(action == item)
