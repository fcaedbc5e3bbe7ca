"""Runs without a fault: healthy ones of many shapes, and busy ones that look unusual for a good reason.

Each kind is a known source of false alarms: warm-up, compilation, checkpoints, evaluation, noise, pipeline stages of
different size, hot but not throttled GPUs, old or harmless XIDs, non-zero counters that do not grow.
"""

from __future__ import annotations

from collections.abc import Callable

from craton.bench.why.scenarios.faults import make_server
from craton.bench.why.scenarios.world import GPU_WATTS, Signal, World

QUIET: dict[str, Callable[[World], None]] = {}


def quiet(change: Callable[[World], None]) -> Callable[[World], None]:
    QUIET[change.__name__] = change
    return change


def _some_gpu(world: World) -> tuple[str, dict[str, str]]:
    rank = world.draw_rank()
    return world.node_of(rank), {"gpu": str(rank % world.ranks_per_node)}


@quiet
def plain(world: World) -> None:
    """As planned."""


@quiet
def first_steps(world: World) -> None:
    world.steps, world.age_seconds = world.chance.randint(1, 6), 0.0


@quiet
def compiles(world: World) -> None:
    """Minutes before the first step."""
    world.steps, world.age_seconds = 0, 0.0
    world.silence_seconds = world.chance.uniform(60.0, 400.0)
    world.kinds = dict.fromkeys(range(world.world), "compile")


@quiet
def loads(world: World) -> None:
    world.steps, world.age_seconds = 0, 0.0
    world.silence_seconds = world.chance.uniform(20.0, 150.0)
    world.kinds = dict.fromkeys(range(world.world), world.chance.choice(("start", "restore")))


@quiet
def saves_now(world: World) -> None:
    world.checkpoint_now, world.silence_seconds = True, world.chance.uniform(5.0, 40.0)


@quiet
def evaluates(world: World) -> None:
    world.silence_seconds = world.chance.uniform(30.0, 200.0)
    world.kinds = dict.fromkeys(range(world.world), "evaluate")


@quiet
def noisy(world: World) -> None:
    """Samples of different lengths: the work of every rank varies, and the slowest rank changes with each step. The
    plan includes this: the longest of many draws is about two deviations above the mean."""
    world.swing, world.outliers = world.chance.uniform(0.06, 0.15), 0.08
    world.plan_error = 1.0 + 2.0 * world.swing * world.base["compute"] / world.step_seconds


@quiet
def swings_together(world: World) -> None:
    world.common_swing = world.chance.uniform(0.08, 0.15)


@quiet
def long_step_now(world: World) -> None:
    """The current step takes three times as long as usual."""
    world.silence_seconds = 2.0 * world.step_seconds


@quiet
def busy_host(world: World) -> None:
    """Data loaders use all CPUs of all nodes, and the ranks do not need them."""
    for node in world.nodes:
        world.set("node_load1", node, world.chance.uniform(3.5, 5.5), 4000.0)
        world.set("node_pressure_cpu_waiting_seconds_total", node, world.chance.uniform(0.1, 0.25), 4000.0)


@quiet
def hot_cards(world: World) -> None:
    for node in world.nodes:
        for gpu in range(world.ranks_per_node):
            world.set("DCGM_FI_DEV_GPU_TEMP", node, world.chance.uniform(74, 81), 4000.0, gpu=str(gpu))


@quiet
def at_the_power_limit(world: World) -> None:
    """All GPUs reach their power limit in dense kernels, as planned; clocks drop slightly everywhere."""
    for node in world.nodes:
        for gpu in range(world.ranks_per_node):
            label = {"gpu": str(gpu)}
            world.set("DCGM_FI_DEV_POWER_USAGE", node, 0.985 * GPU_WATTS, 4000.0, **label)
            world.set("DCGM_FI_DEV_POWER_VIOLATION", node, world.chance.uniform(0.2, 0.5) * 1e9, 4000.0, **label)
            world.set("DCGM_FI_DEV_SM_CLOCK", node, world.chance.uniform(1650, 1760), 4000.0, **label)
            world.set("craton_gpu_clocks_held", node, 1.0, 4000.0, **label, reason="sw_power_cap")


@quiet
def corrected_errors(world: World) -> None:
    """Occasional corrected single-bit errors, and rows remapped long ago."""
    node, gpu = _some_gpu(world)
    errors = Signal(0.0, is_counter=True, total=float(world.chance.randint(1, 40)))
    world.show("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", node, errors, **gpu)


@quiet
def old_xid(world: World) -> None:
    """An XID of a program from days ago."""
    node, gpu = _some_gpu(world)
    ago = world.chance.uniform(1.0, 9.0) * 86400.0
    code = world.chance.choice((13, 31, 43, 94, 79))
    world.show("craton_gpu_xid_moment_seconds", node, Signal(world.now - ago), xid=str(code), **gpu)


@quiet
def harmless_xid(world: World) -> None:
    """An XID that NVIDIA's table says to ignore."""
    node, gpu = _some_gpu(world)
    code = world.chance.choice((63, 43))
    world.show("craton_gpu_xid_moment_seconds", node, Signal(world.now - 200.0), xid=str(code), **gpu)


@quiet
def few_retransmissions(world: World) -> None:
    for node in world.nodes:
        for number in range(4):
            world.set(
                "node_amazonefa_retrans_bytes",
                node,
                5e9 * world.chance.uniform(1e-5, 1e-4),
                4000.0,
                device=f"rdmap{number}s0",
                port="1",
            )


@quiet
def old_network_events(world: World) -> None:
    """Constant counters: a peer was lost when another job ended last week."""
    node = world.draw_node()
    events = Signal(0.0, is_counter=True, total=float(world.chance.randint(1, 60)))
    world.show("node_amazonefa_unresponsive_remote_events", node, events, device="rdmap1s0", port="1")


@quiet
def busy_file_system(world: World) -> None:
    """More and somewhat slower requests than usual, while the loader stays ahead."""
    for node in world.nodes:
        for target in ("fsx-OST0000-osc", "fsx-OST0001-osc"):
            labels = {"component": "client", "target": target}
            for metric, times in (("craton_lustre_requests_total", 3.0), ("craton_lustre_request_seconds_total", 5.0)):
                before = world.signals[(metric, node, tuple(sorted(labels.items())))].before
                world.set(metric, node, before * times, 600.0, **labels)


@quiet
def after_a_recovery(world: World) -> None:
    """A rank was killed a while ago, and the run recovered."""
    world.breaks = {world.chance.randint(8, 50): (1, "was killed by SIGKILL")}


@quiet
def few_recoveries(world: World) -> None:
    """Three restarts within the hour, by three ranks: normal on a large cluster."""
    chosen = sorted(world.chance.sample(range(8, 60), 3), reverse=True)
    world.breaks = {left: (world.draw_rank(), "exited with code 1: peer gone") for left in chosen}


@quiet
def spare_waits(world: World) -> None:
    world.spares = {f"{world.prefix}-spare": world.chance.uniform(0.1, 3.0)}


@quiet
def serves(world: World) -> None:
    """Bursts of requests that are served quickly: the queue is empty between them."""
    make_server(world)
    every, most = world.chance.uniform(15.0, 40.0), world.chance.randint(20, 60)
    world.queue = lambda ago: (16, most if ago % every < 8.0 else 0)


@quiet
def stages_differ(world: World) -> None:
    """The last pipeline stage has more work, as planned."""
    world.pipeline = 2 if world.num_nodes % 2 == 0 else 1


@quiet
def within_the_interval(world: World) -> None:
    """The plan was slightly optimistic."""
    world.plan_error = world.chance.uniform(0.92, 0.97)


@quiet
def one_failed_save(world: World) -> None:
    """Fixed since: later saves succeeded."""
    failed = {"event": "checkpoint_failed", "reason": "ConnectionError: try again"}
    world.saves["nvme"] = [failed, {}, {}]


@quiet
def not_measured(world: World) -> None:
    world.is_measured = False


@quiet
def is_done(world: World) -> None:
    world.state, world.job_state = "done", "COMPLETED"


@quiet
def was_stopped(world: World) -> None:
    world.state, world.job_state = "stopped", "COMPLETED"


@quiet
def noisy_loss(world: World) -> None:
    """Batches differ: single losses deviate slightly."""
    for left in world.chance.sample(range(2, 60), 8):
        world.loss_after[left] = world.chance.uniform(-0.15, 0.25)
        world.loss_after.setdefault(left - 1, 0.0)
