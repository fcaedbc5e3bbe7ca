"""gloo and NCCL stay on the run's network, unless the user says otherwise."""

from __future__ import annotations

import socket

import pytest

from craton.agent.processes import address_towards, pin_interfaces
from craton.agent.processes.network import GLOO_VARIABLE, NCCL_VARIABLE, interface_of

LOOPBACK = next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "localhost", "::1"])
def test_a_local_run_stays_on_the_loopback(address: str) -> None:
    environment: dict[str, str] = {}
    pin_interfaces(address, environment)
    assert environment == {GLOO_VARIABLE: LOOPBACK, NCCL_VARIABLE: LOOPBACK}


def test_what_the_user_says_is_kept() -> None:
    environment = {NCCL_VARIABLE: "eth7"}
    pin_interfaces("127.0.0.1", environment, {GLOO_VARIABLE: "bond0"})
    assert environment == {NCCL_VARIABLE: "eth7"}, "and what the job file says reaches the ranks by itself"


def test_between_machines_gloo_takes_the_interface_of_the_nodes_address() -> None:
    try:
        address = address_towards("192.0.2.200", 9)
    except OSError:
        pytest.skip("this machine has no network")
    interface = interface_of(address)
    assert interface in [name for _, name in socket.if_nameindex()]
    environment: dict[str, str] = {}
    pin_interfaces(address, environment)
    assert environment == {GLOO_VARIABLE: interface}, "NCCL may use several networks at once"


def test_an_address_of_no_interface_changes_nothing() -> None:
    environment: dict[str, str] = {}
    pin_interfaces("198.51.100.7", environment)
    assert environment == {}
