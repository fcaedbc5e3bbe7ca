"""Rendezvous time of many ranks: Craton's authenticated store compared with torch's TCPStore.

To build a full mesh with gloo, every rank sets one key with its addresses, then reads the keys of all others. Here some
processes do this for all ranks in turn, as fast as the store allows.

    python benchmarks/store.py --ranks 1000 --processes 14
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from craton.agent.store import StoreClient, StoreServer
from craton.ml.store import RunStore

SECRET = b"benchmark"
ADDRESS_BYTES = 8  # a rank publishes this much for each other rank
TIMEOUT = timedelta(seconds=600)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--processes", type=int, default=4)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for kind in ("TCPStore", "Craton"):
        results: Any = context.Queue()
        addresses: Any = context.Queue()
        server = context.Process(target=serve, args=(kind, addresses), daemon=True)
        server.start()
        address = addresses.get()
        start = context.Barrier(options.processes)
        ranks = [range(options.ranks)[number :: options.processes] for number in range(options.processes)]
        arguments = (kind, address, options.ranks, start, results)
        processes = [context.Process(target=rendezvous, args=(each, *arguments), daemon=True) for each in ranks]
        for process in processes:
            process.start()
        seconds = max(results.get() for _ in processes)
        reads = options.ranks**2
        print(f"{kind}: {options.ranks} ranks, {seconds:.2f} s, {reads / seconds:,.0f} reads/s", flush=True)
        server.kill()


def serve(kind: str, addresses: Any) -> None:
    if kind == "Craton":
        server = StoreServer("127.0.0.1", SECRET)
        addresses.put(server.address)
        server.serve_forever()
    else:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        addresses.put(f"127.0.0.1:{store.port}")
        time.sleep(TIMEOUT.total_seconds())


def rendezvous(own: range, kind: str, address: str, world: int, start: Any, results: Any) -> None:
    host, _, port = address.rpartition(":")
    store: dist.Store
    if kind == "Craton":
        store = RunStore(StoreClient(address, SECRET, TIMEOUT.total_seconds()))
    else:
        store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=TIMEOUT)
    prefixed = dist.PrefixStore("generation/0", store)
    start.wait()
    began = time.perf_counter()
    for rank in own:
        prefixed.set(str(rank), "x" * (ADDRESS_BYTES * world))
    for _ in own:
        for other in range(world):
            prefixed.get(str(other))
    results.put(time.perf_counter() - began)


if __name__ == "__main__":
    main()
