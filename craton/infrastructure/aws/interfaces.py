"""Network interfaces of an instance: one with an address, and an EFA on every card that has it.

With default interfaces a node silently uses one network card of 32; this table prevents that.
"""

from __future__ import annotations

from dataclasses import dataclass

from craton.infrastructure.aws.site import AwsSite, facts
from craton.infrastructure.errors import ProvisionError

LAYER_LABEL = "topology.k8s.aws/network-node-layer-{}"


@dataclass(frozen=True)
class Interface:
    card: int
    device: int
    kind: str  # "interface" (ENA, has an address) or "efa-only"


def interfaces(site: AwsSite) -> list[Interface]:
    """Return the interfaces in card order: first the ENA interface, then as many EFA as the catalog lists."""
    known = facts()["cards"].get(site.instance.name, {})
    efa = site.instance.network_interfaces if site.instance.efa_version else 0
    first = bool(known.get("first_card_has_efa", True))
    cards = site.aws.network_cards or int(known.get("network_cards", max(1, efa)))
    result = [Interface(0, 0, "interface")]
    if efa and first:
        result.append(Interface(0, 1, "efa-only"))
    result += [Interface(card, 0, "efa-only") for card in range(1, cards)] if efa else []
    made = sum(interface.kind == "efa-only" for interface in result)
    if made != efa:
        raise ProvisionError(
            [
                f"{site.name}: the catalog lists {efa} EFA interfaces for {site.instance.name}, but {cards} network "
                f"cards would carry {made}; set aws.network_cards, or correct the catalog"
            ]
        )
    return result


def network_layers(site: AwsSite) -> int:
    known = facts()["layers"]
    return int(known.get(site.instance.name, known["default"]))


def level_labels(site: AwsSite) -> dict[str, str]:
    """Return level → node label, broadest first: from the cluster file, else the labels that EKS sets by itself."""
    stated = site.file.levels
    labels = {
        name: level.label for name in ("zone", "spine", "leaf") if (level := getattr(stated, name)) and level.label
    }
    if labels:
        return labels
    layers = network_layers(site)
    names = ["leaf", "spine", "core", "core-2"][:layers]
    return {name: LAYER_LABEL.format(layers - index) for index, name in reversed(list(enumerate(names)))}
