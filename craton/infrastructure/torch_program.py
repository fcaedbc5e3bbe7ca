"""The program that measures torch on this machine's CPU; it runs in a child process, so that the caller stays light.

It prints one JSON object: FLOP/s of matmuls by dtype, and the seconds that `microbenchmark.HostCosts` describes; with
the argument `operations` only the seconds of an operation, for the host of a GPU. All of it is CPU time of one thread,
except the collectives between two processes: their lower quartile counts, because another process delays some of them.
"""

from __future__ import annotations

TORCH_PROGRAM = """
import datetime, json, os, statistics, sys, tempfile, time, warnings
from concurrent.futures import ThreadPoolExecutor
import torch
import torch.distributed as dist
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from torch.utils._python_dispatch import TorchDispatchMode

size, seconds, cores = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
warnings.simplefilter("ignore")
torch.set_num_threads(1)


def best(work, clock=time.thread_time, repeats=1, budget=seconds):
    work()
    times, end = [], time.perf_counter() + budget
    while not times or time.perf_counter() < end:
        start = clock()
        for _ in range(repeats):
            work()
        if (took := clock() - start) > 0:  # a coarse clock may not have moved
            times.append(took / repeats)
    return min(times)


def flops(dtype):
    # bf16 can be 200 times slower than fp32, where torch has no kernel for it: small matrices show that in time
    side = 64 if dtype is torch.bfloat16 else size
    took = best(lambda a=torch.rand(side, side).to(dtype): a @ a)
    while side < size and took < 0.01:
        side *= 2
        took = best(lambda a=torch.rand(side, side).to(dtype): a @ a)
    return 2 * side**3 / took


class Count(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.number += 1
        return function(*arguments, **(options or {}))


def operations():
    # a decoder block of tiny tensors: its time is the cost of its operations, not of their arithmetic
    x = torch.rand(2, 16, 32, requires_grad=True)
    wide, narrow, scale = (torch.rand(*shape, requires_grad=True) for shape in ((96, 32), (32, 32), (32,)))
    table = torch.rand(2, 16, 1, 8)

    def rotate(part):
        first, second = part[..., :8], part[..., 8:]
        return torch.cat((first * table - second * table, second * table + first * table), -1)

    def block():
        query, key, value = linear(rms_norm(x, (32,), scale), wide).unflatten(-1, (2, 3, 16)).unbind(-2)
        parts = [part.transpose(1, 2) for part in (rotate(query), rotate(key), value)]
        mixed = scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)
        total = x + linear(mixed, narrow)
        normed = rms_norm(total, (32,), scale)
        return (total + silu(normed) * normed).sum()

    with Count() as forward:
        loss = block()
    with Count() as backward:
        loss.backward()
    times = []
    for _ in range(40):
        start = time.thread_time()
        loss = block()
        middle = time.thread_time()
        loss.backward()
        times.append((middle - start, time.thread_time() - middle))
    medians = [statistics.median(column) for column in zip(*times)]
    return medians[0] / forward.number, medians[1] / backward.number


def loop():
    # what a step does besides the model: rows of tokens, a few numbers of the device, a record
    import numpy

    tokens = numpy.arange(1 << 16, dtype=numpy.uint16)

    def step():
        rows = numpy.stack([tokens[start : start + 65].astype(numpy.int64) for start in range(0, 512, 64)])
        total = torch.from_numpy(rows).sum().double()
        torch.stack([total] * 4).tolist()
        json.dumps({f"run_metric_{number}": number * 1.2345678 for number in range(30)})

    return best(step, budget=seconds / 4)


def update():
    # the optimizer's cost of a tensor, whatever its size
    def tensors():
        return [torch.rand(4) for _ in range(32)]

    state = [tensors() for _ in range(4)]
    steps = [torch.tensor(1.0)] * 32

    def step():
        options = dict(lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False)
        torch._foreach_norm(state[1])
        torch._fused_adamw_(*(list(map(torch.Tensor.detach, part)) for part in state), [], steps, **options)

    return best(step, budget=seconds / 4) / 32


def collectives(rank, store):
    timeout = datetime.timedelta(seconds=300)  # this program is killed earlier; on a busy machine ranks meet late
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timeout)
    found = {}
    for name, count, repeats in (("small", 1024, 30), ("large", 1 << 18, 8)):
        whole, half, quartiles = torch.rand(count), torch.rand(count // 2), []
        for call in (
            lambda: dist.all_reduce(whole),
            lambda: dist.all_gather_into_tensor(whole, half),
            lambda: dist.reduce_scatter_tensor(half, whole),
        ):
            times = []
            for _ in range(repeats):
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
            quartiles.append(sorted(times)[repeats // 4])
        found[name] = quartiles
    small = statistics.mean(found["small"])
    # all-reduce sends a buffer twice through a ring, the others once; of two ranks, each sends half of it
    large = statistics.mean(found["large"][1:])
    return small, 0.5 * 4 * (1 << 18) / max(large - small, 1e-5)


if sys.argv[4:] == ["operations"]:
    print(json.dumps({"operation_seconds": operations()[0]}))
    sys.exit()
folder = tempfile.mkdtemp()
store = os.path.join(folder, "store")
other = os.fork()  # before torch has threads
if other == 0:
    try:
        collectives(1, store)
    finally:
        os._exit(0)
forward, backward = operations()
found = {"operation_seconds": forward, "backward_operation_seconds": backward}
values = torch.rand(1 << 18)
found["exponential_seconds"] = best(values.exp, budget=seconds / 4) / values.numel()
a, b = torch.rand(512, 64), torch.rand(128, 64)  # narrow, as in small models
narrow = best(lambda: linear(a, b), repeats=10, budget=seconds / 4)
found["loop_seconds"], found["tensor_seconds"] = loop(), update()
found["collective_seconds"], found["collective_bytes_per_second"] = collectives(0, store)
os.waitpid(other, 0)
os.remove(store) if os.path.exists(store) else None
os.rmdir(folder)
with ThreadPoolExecutor(cores) as pool:
    fp32, bf16 = (sum(pool.map(flops, [dtype] * cores)) for dtype in (torch.float32, torch.bfloat16))
elements = a.numel() + b.numel() + 512 * 128
rest = narrow - 2 * 128 * a.numel() / (fp32 / cores) - backward
found["matmul_element_seconds"] = max(rest, 0.0) / elements or 1e-12
print(json.dumps({"fp32": fp32, "bf16": bf16, "host": found}))
"""
