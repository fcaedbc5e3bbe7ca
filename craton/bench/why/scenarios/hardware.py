"""Faults of GPUs and of the network between and inside nodes."""

from __future__ import annotations

from craton.bench.why.scenarios.faults import (
    PEER_GONE,
    Victim,
    break_again,
    fault,
    gpu_of,
    level,
    of_node,
    of_rank,
    show_xid,
    slower_card,
)
from craton.bench.why.scenarios.world import GPU_WATTS, Signal, World

# -- devices ---------------------------------------------------------------------------------------------------------


@fault("device", "slow")
def overheats(world: World) -> Victim:
    rank = world.draw_rank()
    node, gpu = world.node_of(rank), gpu_of(world, rank)
    slower_card(world, rank, world.chance.uniform(0.5, 0.82))
    world.set("DCGM_FI_DEV_GPU_TEMP", node, world.chance.uniform(86, 92), **gpu)
    world.set("DCGM_FI_DEV_THERMAL_VIOLATION", node, world.chance.uniform(0.3, 0.95) * 1e9, **gpu)
    world.set("craton_gpu_clocks_held", node, 1.0, **gpu, reason="hw_thermal_slowdown")
    return of_rank(world, rank)


@fault("device", "slow")
def power_capped(world: World) -> Victim:
    """A lower power limit is set on all GPUs of a node."""
    node = world.draw_node()
    watts = world.chance.uniform(0.45, 0.62) * GPU_WATTS
    for rank in world.ranks_of(node):
        gpu = gpu_of(world, rank)
        world.set("DCGM_FI_DEV_POWER_MGMT_LIMIT", node, watts, **gpu)
        world.set("DCGM_FI_DEV_POWER_USAGE", node, watts * 0.99, **gpu)
        world.set("DCGM_FI_DEV_POWER_VIOLATION", node, 0.9e9, **gpu)
        world.set("craton_gpu_clocks_held", node, 1.0, **gpu, reason="sw_power_cap")
    share, last = world.chance.uniform(0.6, 0.8), world.chance.randint(26, 60)
    for rank in world.ranks_of(node):
        slower_card(world, rank, share)
        world.slowdowns[-1].last_steps = last
    return of_node(world, node)


@fault("device", "slow")
def clock_locked(world: World) -> Victim:
    rank = world.draw_rank()
    slower_card(world, rank, world.chance.uniform(0.5, 0.8))
    world.slowdowns[-1].last_steps = None
    return of_rank(world, rank)


@fault("device", "slow")
def power_brake(world: World) -> Victim:
    """A power supply of the node has failed: all its GPUs are throttled."""
    node, share, last = world.draw_node(), world.chance.uniform(0.4, 0.7), world.chance.randint(26, 60)
    for rank in world.ranks_of(node):
        slower_card(world, rank, share)
        world.slowdowns[-1].last_steps = last
        world.set("craton_gpu_clocks_held", node, 1.0, **gpu_of(world, rank), reason="hw_power_brake_slowdown")
        world.set("DCGM_FI_DEV_RELIABILITY_VIOLATION", node, 0.8e9, **gpu_of(world, rank))
    return of_node(world, node)


@fault("device", "dead")
def falls_off_the_bus(world: World) -> Victim:
    rank = world.draw_rank()
    lines = ["RuntimeError: CUDA error: unspecified launch failure"]
    if world.chance.random() < 0.5:
        lines = ["torch.AcceleratorError: CUDA error: GPU is lost"]
    world.die(rank, 1, lines, echo=PEER_GONE)
    world.hide(world.node_of(rank), **gpu_of(world, rank))
    show_xid(world, rank, 79, world.deaths[0].seconds_ago + 3.0)
    return of_rank(world, rank)


@fault("device", "dead")
def uncorrectable_memory_error(world: World) -> Victim:
    rank, code = world.draw_rank(), world.chance.choice((48, 95, 94, 64))
    world.die(
        rank,
        world.chance.choice((1, -6)),
        ["RuntimeError: CUDA error: uncorrectable ECC error encountered"],
        echo=PEER_GONE,
    )
    show_xid(world, rank, code, world.deaths[0].seconds_ago + 2.0)
    ecc = Signal(0.0, 0.0, is_counter=True, total=0.0, burst=world.chance.choice((1.0, 2.0)), onset_seconds=90.0)
    world.show("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", world.node_of(rank), ecc, **gpu_of(world, rank))
    return of_rank(world, rank)


@fault("device", "hung")
def firmware_stops(world: World) -> Victim:
    """The GPU's GSP firmware stops responding; a kernel never ends, and all ranks hang in the next collective."""
    rank = world.draw_rank()
    world.hang()
    show_xid(world, rank, world.chance.choice((119, 120, 109, 62)), world.silence_seconds - 4.0)
    world.set("DCGM_FI_DEV_POWER_USAGE", world.node_of(rank), 120.0, world.silence_seconds, **gpu_of(world, rank))
    return of_rank(world, rank)


@fault("device", "hung")
def asks_for_a_reset(world: World) -> Victim:
    rank = world.draw_rank()
    world.hang()
    show_xid(world, rank, 154, world.silence_seconds - 2.0)
    show_xid(world, rank, 46, world.silence_seconds - 3.0)
    wanted = Signal(1.0, onset_seconds=world.silence_seconds)
    world.show(
        "craton_gpu_recovery_wanted", world.node_of(rank), wanted, **gpu_of(world, rank), action="GPU Reset Required"
    )
    return of_rank(world, rank)


@fault("device", "healthy")
def broke_it_before(world: World) -> Victim:
    """A GPU failed, the run hung until its agents ended it, and it restarted on the same GPU."""
    rank = world.draw_rank()
    left = world.chance.randint(8, 40)
    world.breaks = {left: (rank, "hangs in productive at step 40: no progress for 75.0 s")}
    # The step after a restart takes longer; a few seconds do not matter.
    back_seconds = (left + world.warm_up) * world.step_seconds
    show_xid(world, rank, world.chance.choice((79, 119, 95)), back_seconds + world.chance.uniform(70.0, 500.0))
    return of_rank(world, rank)


@fault("device", "slow")
def breaks_it_again(world: World) -> Victim:
    """GPU memory that fails each time the run restarts."""
    rank = world.draw_rank()
    break_again(world, world.chance.randint(4, 9), lambda number: (rank, "was killed by SIGABRT"))
    show_xid(world, rank, 95, (min(world.breaks) + world.warm_up) * world.step_seconds + 10.0)
    return of_rank(world, rank)


@fault("device", "slow")
def pcie_narrow(world: World) -> Victim:
    """A GPU with fewer PCIe lanes: copies from the host take longer."""
    rank = world.draw_rank()
    world.slow((rank,), "compute", world.chance.uniform(1.2, 1.5))
    lanes = world.chance.choice((4.0, 8.0, 1.0))
    world.set("DCGM_FI_DEV_PCIE_LINK_WIDTH", world.node_of(rank), lanes, **gpu_of(world, rank))
    world.set(
        "DCGM_FI_DEV_PCIE_REPLAY_COUNTER", world.node_of(rank), world.chance.uniform(1.0, 20.0), **gpu_of(world, rank)
    )
    return of_rank(world, rank)


@fault("device", "wrong")
def computes_wrong(world: World) -> Victim:
    """Silent data corruption: the gradients of one GPU are wrong, and the loss rises slightly."""
    rank, last = world.draw_rank(), world.chance.randint(8, 30)
    world.norm_factor[rank] = (last, world.chance.choice((6.0, 12.0, 40.0)))
    world.loss_after[last] = world.chance.uniform(0.0, 0.05)
    return of_rank(world, rank)


# -- fabric ----------------------------------------------------------------------------------------------------------


def _devices(world: World, node: str) -> list[dict[str, str]]:
    return [{"device": f"rdmap{number}s0", "port": "1"} for number in range(4)]


def _less_traffic(world: World) -> None:
    """The same bytes in longer steps."""
    share = world.step_seconds / (world.step_seconds + (world.network_factor - 1.0) * world.base["communication"])
    for node in world.nodes:
        for device in _devices(world, node):
            for metric in ("node_amazonefa_tx_bytes", "node_amazonefa_rx_bytes"):
                key = (metric, node, tuple(sorted(device.items())))
                if key in world.signals:
                    world.set(metric, node, world.signals[key].before * share, **device)


@fault("fabric", "slow")
def loses_packets(world: World) -> Victim:
    """A bad cable: one NIC retransmits, and collectives run at the speed of the slowest path."""
    node = world.draw_node()
    world.congest(0.2, 1.0)
    _less_traffic(world)
    device = world.chance.choice(_devices(world, node))
    sent = level(world, "node_amazonefa_tx_bytes", node, **device)
    world.set("node_amazonefa_retrans_bytes", node, sent * world.chance.uniform(0.01, 0.08), **device)
    world.set("node_amazonefa_rx_drops", node, world.chance.uniform(5.0, 200.0), **device)
    return of_node(world, node)


@fault("fabric", "slow")
def rail_slow(world: World) -> Victim:
    node = world.draw_node()
    world.congest(0.2, 0.8)
    _less_traffic(world)
    device = world.chance.choice(_devices(world, node))
    for metric in ("node_amazonefa_tx_bytes", "node_amazonefa_rx_bytes"):
        world.set(metric, node, level(world, metric, node, **device) * world.chance.uniform(0.05, 0.3), **device)
    return of_node(world, node)


@fault("fabric", "slow")
def leaf_congested(world: World) -> Victim:
    """Congested uplinks of one leaf: every node below it retransmits, no other node does."""
    leaf = world.leaf_of(world.draw_node())
    world.congest(0.25, 1.0)
    _less_traffic(world)
    for node in world.leaf_members(leaf):
        for device in _devices(world, node):
            sent = level(world, "node_amazonefa_tx_bytes", node, **device)
            world.set("node_amazonefa_retrans_bytes", node, sent * world.chance.uniform(0.01, 0.04), **device)
    members = world.leaf_members(leaf)
    if len(members) == world.num_nodes:
        return Victim()  # there is no other leaf to compare with
    return Victim(members[0] if len(members) == 1 else "", frozenset(), leaf)


@fault("fabric", "slow")
def speaks_tcp(world: World) -> Victim:
    """NCCL found its network plugin on no node: all traffic uses TCP sockets since the first step."""
    world.network_factor, world.network_last_steps = world.chance.uniform(6.0, 12.0), None
    for rank in range(world.world):
        name = world.node_of(rank)
        world.old_logs[rank] = [
            f"{name}:7:7 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.",
            f"{name}:7:7 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.{rank % 250}<0>",
            f"{name}:7:7 [0] NCCL INFO Using network Socket",
        ]
    for node in world.nodes:
        for device in _devices(world, node):
            for metric in ("node_amazonefa_tx_bytes", "node_amazonefa_rx_bytes", "node_amazonefa_retrans_bytes"):
                world.show(metric, node, Signal(0.0, is_counter=True, total=0.0), **device)
    return Victim()


@fault("fabric", "hung")
def link_goes_down(world: World) -> Victim:
    node = world.draw_node()
    world.hang()
    device = world.chance.choice(_devices(world, node))
    world.set("node_infiniband_state_id", node, 1.0, world.silence_seconds, **device)
    for item in world.nodes:
        for card in _devices(world, item):
            for metric in ("node_amazonefa_tx_bytes", "node_amazonefa_rx_bytes", "node_amazonefa_retrans_bytes"):
                world.set(metric, item, 0.0, world.silence_seconds, **card)
    return of_node(world, node)


@fault("fabric", "hung")
def peer_does_not_answer(world: World) -> Victim:
    """A node lost its network: all other nodes report one unresponsive peer; it reports all of them."""
    node = world.draw_node()
    world.hang(seconds=world.chance.uniform(300.0, 500.0))
    for item in world.nodes:
        for device in _devices(world, item):
            for metric in ("node_amazonefa_tx_bytes", "node_amazonefa_rx_bytes", "node_amazonefa_retrans_bytes"):
                world.set(metric, item, 0.0, world.silence_seconds, **device)
            events = (world.num_nodes - 1) * 4.0 if item == node else 4.0
            signal = Signal(
                0.0, 0.0, is_counter=True, total=0.0, burst=events, onset_seconds=world.silence_seconds - 30.0
            )
            world.show("node_amazonefa_unresponsive_remote_events", item, signal, **device)
    return of_node(world, node) if world.num_nodes > 2 else Victim()  # of two nodes, each reports the other


@fault("fabric", "slow")
def nvlink_errs(world: World) -> Victim:
    """A marginal NVLink: replays slow its traffic, inside the collectives."""
    rank = world.draw_rank()
    world.congest(0.2, 0.6)
    _less_traffic(world)
    gpu, node = gpu_of(world, rank), world.node_of(rank)
    world.set("DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", node, world.chance.uniform(20.0, 400.0), **gpu)
    world.set("DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", node, world.chance.uniform(5.0, 100.0), **gpu)
    return of_rank(world, rank)


@fault("fabric device", "hung dead")
def nvlink_breaks(world: World) -> Victim:
    """XID 74, an NVLink error: reported for the GPU, caused by the link."""
    rank = world.draw_rank()
    world.hang()
    show_xid(world, rank, 74, world.silence_seconds - 2.0)
    links = float(world.chance.randint(8, 17))
    world.set(
        "craton_gpu_nvlink_active_links", world.node_of(rank), links, world.silence_seconds, **gpu_of(world, rank)
    )
    return of_rank(world, rank)
