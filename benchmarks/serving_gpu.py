"""Throughput and latency of the engine on this GPU, as a share of the memory roofline, and transformers for comparison.

`python benchmarks/serving_gpu.py [--case NAME …] [--profile] [--json FILE]`; cases: batch1, set256, poisson, tuned,
host, drafts, adapters, fp8, peer, mix-0.6b, mix-14b

Weights are random, outputs have fixed lengths, warm-up is not counted: tokens/s = output tokens ÷ seconds from the
first submit. Greedy outputs of the same weights are compared with transformers, token by token.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from craton.job.model import model_preset
from craton.ml.models import Decoder, config_from_shape
from craton.ml.serving.device import Adapters, StepResult
from craton.ml.serving.device.float8 import quantize_model
from craton.ml.serving.engine import build_runner, join_engine
from craton.ml.serving.engine.build import build_engine
from craton.ml.serving.engine.engine import Engine
from craton.ml.serving.messages import Sampling, Submit
from craton.ml.serving.settings import EngineSettings

DEVICE = torch.device("cuda")
LONGEST = 4096
COMPILED: list[str] = []  # kernels that Triton compiled or fetched compiled since the list was cleared


def count_compiled() -> None:
    """Record every kernel that is not ready from now on in COMPILED."""
    from triton import knobs

    def note(*, fn: Any, **_: Any) -> None:
        COMPILED.append(fn.name)

    knobs.runtime.jit_post_compile_hook = note


def make_model(name: str) -> Decoder:
    config = config_from_shape(model_preset(name))
    with torch.device("meta"):
        model = Decoder(config)
    model = model.to(torch.bfloat16).to_empty(device=DEVICE)
    model.initialize(0)
    return model


def measured_copy() -> float:
    """Return the bytes per second that a large copy reads and writes."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    times = []
    for _ in range(10):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return 2 * source.numel() / min(times)


def answer(engine: Engine, requests: list[Submit]) -> tuple[dict[int, list[int]], float]:
    """Return the outputs of all requests and the seconds they took."""
    tokens: dict[int, list[int]] = {request.id: [] for request in requests}
    gc.collect()
    gc.freeze()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for request in requests:
        engine.submit(request)
    while not engine.is_idle:
        for piece in engine.step():
            assert not piece.error, piece.error
            tokens[piece.id] += piece.tokens
    return tokens, time.perf_counter() - began


@contextmanager
def waiting() -> Iterator[list[float]]:
    """Collect the seconds that the host waits for the device; without any, the host is the bottleneck."""
    seconds = [0.0]
    read = StepResult.read

    def timed(result: StepResult) -> tuple[list[int], list[float]]:
        began = time.perf_counter()
        if result.done is not None:
            result.done.synchronize()
        seconds[0] += time.perf_counter() - began
        return read(result)

    StepResult.read = timed  # type: ignore[assignment,method-assign]
    try:
        yield seconds
    finally:
        StepResult.read = read  # type: ignore[method-assign]


def profile(engine: Engine, vocabulary: int, requests: int, length: int) -> list[str]:
    """Print the slowest kernels of a decode step: microseconds per step, and calls."""
    sampling = Sampling(max_tokens=60, temperature=0.6, ignore_eos=True)
    for number, prompt in enumerate(texts(requests, length, length, vocabulary, 11)):
        engine.submit(Submit(9000 + number, prompt, sampling))
    while len(engine.scheduler.running) < requests or any(each.pending > 1 for each in engine.scheduler.running):
        engine.step()
    steps = 10
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    while not engine.is_idle:
        engine.step()
    found = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in found)
    rows = [
        f"{event.self_device_time_total / steps:8.1f} us {event.count / steps:6.1f} x {event.key[:70]}"
        for event in found
    ]
    return [f"{total / steps:8.1f} us in total", *rows[:14]]


def texts(count: int, shortest: int, longest: int, vocabulary: int, seed: int = 0) -> list[tuple[int, ...]]:
    generator = random.Random(seed)
    lengths = [generator.randint(shortest, longest) for _ in range(count)]
    return [tuple(generator.randrange(vocabulary) for _ in range(length)) for length in lengths]


def batch1(engine: Engine, vocabulary: int) -> dict[str, Any]:
    (prompt,) = texts(1, 512, 512, vocabulary)
    sampling = Sampling(max_tokens=512, temperature=0.0, ignore_eos=True)
    answer(engine, [Submit(1, prompt, sampling)])
    rates = []
    for number in range(2):
        tokens, seconds = answer(engine, [Submit(10 + number, prompt, sampling)])
        rates.append(len(tokens[10 + number]) / seconds)
    return {"tokens_per_second": statistics.median(rates), "all": rates}


def request_set(engine: Engine, vocabulary: int, count: int = 256, written: int = 256) -> dict[str, Any]:
    sampling = Sampling(max_tokens=written, temperature=0.0, ignore_eos=True)

    def run(seed: int) -> float:
        prompts = texts(count, 100, 1024, vocabulary, seed)
        found, seconds = answer(engine, [Submit(n, prompt, sampling) for n, prompt in enumerate(prompts)])
        return sum(map(len, found.values())) / seconds

    run(1)
    with waiting() as waited:
        rate = run(2)
    return {"tokens_per_second": rate, "host_waited_seconds": waited[0], **speed(engine)}


def published_mix(engine: Engine, vocabulary: int) -> dict[str, Any]:
    """256 requests of 100 to 1024 tokens in and out, seed 0, temperature 0.6."""

    def run(seed: int) -> float:
        generator = random.Random(seed)
        prompts = [
            tuple(generator.randint(0, min(10_000, vocabulary - 1)) for _ in range(generator.randint(100, 1024)))
            for _ in range(256)
        ]
        requests = [
            Submit(n, prompt, Sampling(max_tokens=generator.randint(100, 1024), temperature=0.6, ignore_eos=True))
            for n, prompt in enumerate(prompts)
        ]
        found, seconds = answer(engine, requests)
        return sum(map(len, found.values())) / seconds

    warm = texts(64, 100, 300, vocabulary, 7)
    answer(engine, [Submit(n, text, Sampling(max_tokens=20, temperature=0.6)) for n, text in enumerate(warm)])
    engine.forget()
    with waiting() as waited:
        rate = run(0)
    return {"tokens_per_second": rate, "host_waited_seconds": waited[0], **speed(engine)}


def speed(engine: Engine) -> dict[str, Any]:
    stats = engine.stats()
    return {"steps": stats.steps, "preemptions": stats.preemptions, "blocks": stats.blocks}


def poisson(engine: Engine, vocabulary: int, saturated: float) -> dict[str, Any]:
    """Requests of 100 to 1024 tokens in, 256 out, with Poisson arrivals at 70 % of the engine's throughput."""
    written = 256
    rate = 0.7 * saturated / written
    generator = random.Random(0)
    prompts = texts(400, 100, 1024, vocabulary, 5)
    due: list[float] = []
    moment = 0.0
    for _ in prompts:
        moment += generator.expovariate(rate)
        due.append(moment)
    sampling = Sampling(max_tokens=written, temperature=0.0, ignore_eos=True)
    engine.forget()
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    gaps: list[float] = []
    began = time.perf_counter()
    sent = 0
    while sent < len(prompts) or not engine.is_idle:
        now = time.perf_counter() - began
        while sent < len(prompts) and due[sent] <= now:
            engine.submit(Submit(sent, prompts[sent], sampling))
            sent += 1
        if engine.is_idle:
            continue
        for piece in engine.step():
            now = time.perf_counter() - began
            if piece.id not in first:
                first[piece.id] = now
            else:
                gaps.append(now - last[piece.id])
            last[piece.id] = now
    waits = [first[number] - due[number] for number in first]
    return {
        "requests_per_second": rate,
        "inter_token_p50": quantile(gaps, 0.5),
        "inter_token_p99": quantile(gaps, 0.99),
        "ratio": quantile(gaps, 0.99) / quantile(gaps, 0.5),
        "first_token_p50": quantile(waits, 0.5),
        "first_token_p99": quantile(waits, 0.99),
    }


def tuned(engine: Engine, vocabulary: int) -> dict[str, Any]:
    """Measure the cost of sampling: the set greedy, with only a temperature, and with top-k and top-p."""
    prompts = texts(256, 100, 200, vocabulary, 3)
    ways = {
        "greedy": Sampling(max_tokens=128, temperature=0.0, ignore_eos=True),
        "temperature": Sampling(max_tokens=128, temperature=0.7, ignore_eos=True),
        "top_p": Sampling(max_tokens=128, temperature=0.7, top_p=0.9, ignore_eos=True),
        "top_k_and_top_p": Sampling(max_tokens=128, temperature=0.7, top_k=50, top_p=0.9, ignore_eos=True),
        "min_p": Sampling(max_tokens=128, temperature=0.7, min_p=0.05, ignore_eos=True),
        "penalties": Sampling(max_tokens=128, temperature=0.7, frequency_penalty=0.3, ignore_eos=True),
    }
    found = {}
    for name, sampling in [("warm-up", ways["greedy"]), *ways.items()]:
        answer(engine, [Submit(n, prompt, sampling) for n, prompt in enumerate(prompts[:16])])
        engine.forget()
        tokens, seconds = answer(engine, [Submit(n, prompt, sampling) for n, prompt in enumerate(prompts)])
        found[name] = sum(map(len, tokens.values())) / seconds
    del found["warm-up"]
    return found


def host_memory(model: Decoder) -> dict[str, Any]:
    """Send 32 long prompts twice, with device space for half of them: seconds to all first tokens of the second round,
    with and without a host-memory prefix cache for the others."""
    vocabulary = model.config.shape.vocab
    prompts = texts(32, 3500, 3500, vocabulary, 4)
    sampling = Sampling(max_tokens=1, temperature=0.0)
    found: dict[str, Any] = {}
    for name, room in (("without", 0), ("with", 16 << 30)):
        engine = build_engine(
            model, EngineSettings(max_length=LONGEST, blocks=3600, chunk_tokens=8192, max_running=8, host_bytes=room)
        )
        answer(engine, [Submit(n, prompt, sampling) for n, prompt in enumerate(prompts)])
        first, _ = answer(engine, [Submit(n, prompt, sampling) for n, prompt in enumerate(prompts)])
        again, seconds = answer(engine, [Submit(n, prompt, sampling) for n, prompt in enumerate(prompts)])
        stats = engine.stats()
        found[name] = {"seconds": seconds, "device_hits": stats.prefix_hits, "host_hits": stats.host_hits}
        assert again == first
        del engine
    return found


def drafts(model: Decoder) -> dict[str, Any]:
    """One request without speculative decoding, with all draft tokens accepted, and with none proposed."""
    vocabulary = model.config.shape.vocab
    (part,) = texts(1, 24, 24, vocabulary, 6)
    sampling = Sampling(max_tokens=512, temperature=0.0, ignore_eos=True)
    found: dict[str, Any] = {}
    for name, count, repeats in (("no drafts", 0, True), ("all right", 4, True), ("none proposed", 4, False)):
        if repeats and not count:
            repeat(model, part)
        if not repeats:
            model.initialize(0)
        engine = build_engine(model, EngineSettings(max_length=LONGEST, blocks=3600, max_running=8, draft_tokens=count))
        answer(engine, [Submit(1, part * 4, sampling)])
        before = engine.stats()
        tokens, seconds = answer(engine, [Submit(2, part * 4, sampling)])
        after = engine.stats()
        found[name] = {
            "tokens_per_second": 512 / seconds,
            "drafted": after.drafted - before.drafted,
            "accepted": after.accepted - before.accepted,
        }
        if repeats:
            assert tokens[2] == [part[place % len(part)] for place in range(512)]
        del engine
    return found


def repeat(model: Decoder, part: tuple[int, ...]) -> None:
    """Make the model repeat this sequence forever at the same compute cost: layers add nothing, and the head maps each
    token to the next."""
    for name, parameter in model.named_parameters():
        if name.endswith(("attention.output.weight", "mlp.down.weight")):
            parameter.data.zero_()
    head, embedding = model.head_weight.data, model.embedding.weight.data
    head.zero_()
    for here, following in zip(part, (*part[1:], part[0]), strict=True):
        head[following] = embedding[here]


def adapted(model: Decoder) -> dict[str, Any]:
    """Measure with slots for eight adapters of rank 16 in every layer, of which no request uses one."""
    adapters = Adapters(model, 8, 16)
    runner, settings, longest = build_runner(model, EngineSettings(max_length=LONGEST), adapters=adapters)
    engine = join_engine(runner, runner, settings, longest)
    vocabulary = model.config.shape.vocab
    return {"batch1": batch1(engine, vocabulary), "set256": request_set(engine, vocabulary)}


def in_fp8(model: Decoder) -> dict[str, Any]:
    """Weights and KV cache in fp8: throughput, and how many greedy tokens equal bf16."""
    theirs = their_model(model)
    quantize_model(model)
    engine = build_engine(model, EngineSettings(max_length=LONGEST, chunk_tokens=8192, kv_precision="fp8"))
    vocabulary = model.config.shape.vocab
    found = {"batch1": batch1(engine, vocabulary), "set256": request_set(engine, vocabulary)}
    return {**found, "check": compare(engine, theirs, vocabulary)}


def quantile(numbers: list[float], share: float) -> float:
    return sorted(numbers)[min(len(numbers) - 1, int(share * len(numbers)))]


def check(engine: Engine, model: Decoder) -> dict[str, Any]:
    """Compare greedy outputs with transformers on the same weights; where they differ, how close the tokens were."""
    theirs = their_model(model)
    return compare(engine, theirs, model.config.shape.vocab)


def compare(engine: Engine, theirs: Any, vocabulary: int) -> dict[str, Any]:
    prompts = texts(8, 40, 300, vocabulary, 9)
    sampling = Sampling(max_tokens=64, temperature=0.0, ignore_eos=True)
    found, _ = answer(engine, [Submit(5000 + n, prompt, sampling) for n, prompt in enumerate(prompts)])
    same = total = others = 0
    farthest = 0.0
    for n, prompt in enumerate(prompts):
        text = torch.tensor([[*prompt, *found[5000 + n]]], device=DEVICE)
        with torch.inference_mode():
            logits = theirs(text).logits[0, len(prompt) - 1 : -1].float()
            theirs.set_attn_implementation("eager")
            otherwise = theirs(text).logits[0, len(prompt) - 1 : -1]
            theirs.set_attn_implementation("sdpa")
        chosen = text[0, len(prompt) :]
        best = logits.max(-1)
        others += int((best.indices == otherwise.argmax(-1)).sum())
        same += int((best.indices == chosen).sum())
        total += len(chosen)
        gap = best.values - logits.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        farthest = max(farthest, float((gap / logits.std(-1)).max()))
    return {
        "same": same,
        "of": total,
        "farthest_gap_in_deviations": farthest,
        "same_of_two_attentions_of_transformers": others,
    }


def their_model(model: Decoder) -> Any:
    """Return a transformers model with the same weights, in the same memory where they are not fused."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from craton.ml.models import weight_entries
    from craton.ml.models.huggingface import config_to_huggingface

    fields = config_to_huggingface(model.config)
    config = AutoConfig.for_model(**fields)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    own = dict(model.named_parameters())
    state = {}
    for entry in weight_entries(model.config, "each"):
        for name, part in entry.split(own[entry.ours].detach(), torch.bfloat16):
            state[name] = part.to(DEVICE)
    theirs.load_state_dict(state, assign=True, strict=False)
    if model.config.shape.tied_embeddings:
        theirs.tie_weights()
    rotary = theirs.model.rotary_emb
    theirs.model.rotary_emb = type(rotary)(config=config).to(DEVICE)
    return theirs.eval()


def peer(model: Decoder) -> dict[str, Any]:
    """Compare transformers' continuous batching and this engine on the same few requests; the former is slow."""
    from transformers import GenerationConfig

    count, written = 64, 64
    prompts = texts(count, 100, 1024, model.config.shape.vocab, 2)
    engine = build_engine(model, EngineSettings(max_length=LONGEST, chunk_tokens=8192, memory=0.5))
    sampling = Sampling(max_tokens=written, temperature=0.0, ignore_eos=True)
    answer(engine, [Submit(n, prompt[:50], sampling) for n, prompt in enumerate(prompts)])
    _, own_seconds = answer(engine, [Submit(n, prompt, sampling) for n, prompt in enumerate(prompts)])
    del engine
    free()
    theirs = their_model(model)
    theirs.set_attn_implementation("paged|sdpa")
    settings = GenerationConfig(max_new_tokens=written, do_sample=False, eos_token_id=-1, pad_token_id=0)
    theirs.generate_batch(inputs=[list(prompt[:50]) for prompt in prompts[:8]], generation_config=settings)
    torch.cuda.synchronize()
    began = time.perf_counter()
    found = theirs.generate_batch(inputs=[list(prompt) for prompt in prompts], generation_config=settings)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return {
        "requests": count,
        "ours": count * written / own_seconds,
        "transformers": sum(len(each.generated_tokens) for each in found.values()) / seconds,
    }


Say = Callable[..., Any]
OF_LLAMA = ("batch1", "set256", "poisson", "tuned", "host", "drafts", "adapters", "fp8", "peer")
CASES = (*OF_LLAMA, "mix-0.6b", "mix-14b")


def start(name: str, chunk: int, say: Say, memory: float = 0.9) -> tuple[Decoder, Engine]:
    """Return a model and its engine, the seconds to build the model, and those of the engine to its first token."""
    began = time.perf_counter()
    model = make_model(name)
    made = time.perf_counter()
    engine = build_engine(model, EngineSettings(max_length=LONGEST, chunk_tokens=chunk, memory=memory))
    answer(engine, [Submit(1, (1, 2, 3), Sampling(max_tokens=1, temperature=0.0))])
    say(f"{name} start", list, (made - began, time.perf_counter() - made))
    COMPILED.clear()
    return model, engine


def llama(cases: list[str], options: argparse.Namespace, say: Say) -> None:
    model = of_one_engine(cases, options, say)
    for case, measure in {"host": host_memory, "peer": peer}.items():
        if case in cases:
            free()
            say(case, measure, model)
    for case, measure in {"drafts": drafts, "adapters": adapted, "fp8": in_fp8}.items():  # these change the model
        if case in cases:
            model = None
            free()
            model = make_model("llama-3.1-8b")
            say(case, measure, model)


def of_one_engine(cases: list[str], options: argparse.Namespace, say: Say) -> Decoder | None:
    model, engine = start("llama-3.1-8b", options.chunk, say)
    vocabulary = model.config.shape.vocab
    if "batch1" in cases:
        say("batch1", batch1, engine, vocabulary)
        if options.profile:
            print(*profile(engine, vocabulary, 1, 600), sep="\n", flush=True)
    if {"set256", "poisson"} & set(cases):
        saturated = say("set256", request_set, engine, vocabulary)
        if "poisson" in cases:
            engine.scheduler.chunk_tokens = options.short_chunk
            say("poisson", poisson, engine, vocabulary, saturated["tokens_per_second"])
            engine.scheduler.chunk_tokens = options.chunk
    if "tuned" in cases:
        say("tuned", tuned, engine, vocabulary)
    if {"set256", "poisson", "tuned"} & set(cases):
        say("compiled after the start", list, COMPILED)
    say("llama-3.1-8b check", check, engine, model)
    return model


def mix(name: str, options: argparse.Namespace, say: Say) -> None:
    memory = 0.9 if name == "qwen3-0.6b" else 0.7  # transformers needs space for a second copy of the weights
    model, engine = start(name, options.chunk, say, memory)
    vocabulary = model.config.shape.vocab
    if options.profile:
        print(*profile(engine, vocabulary, 256, 600), sep="\n", flush=True)
    say(f"{name} mix", published_mix, engine, vocabulary)
    say(f"{name} check", check, engine, model)


def free() -> None:
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--chunk", type=int, default=8192, help="max tokens per step in throughput cases")
    parser.add_argument("--short-chunk", type=int, default=512, help="max tokens per step in latency cases")
    parser.add_argument("--profile", action="store_true", help="list the kernels of a decode step")
    parser.add_argument("--json")
    options = parser.parse_args()
    cases = options.case or list(CASES)
    results: dict[str, Any] = {"copy_bytes_per_second": measured_copy(), "torch": torch.__version__}
    failed: list[str] = []

    def say(name: str, work: Callable[..., Any], *arguments: Any) -> Any:
        try:
            found = work(*arguments)
        except Exception as error:  # noqa: BLE001 -- the other cases still run
            traceback.print_exc()
            failed.append(name)
            found = {"error": f"{type(error).__name__}: {error}"}
        results[name] = found
        print(name, json.dumps(found, default=str), flush=True)
        if options.json:
            with open(options.json, "w", encoding="utf-8") as file:
                json.dump(results, file, indent=1, default=str)
        return found

    count_compiled()
    if set(OF_LLAMA) & set(cases):
        llama(cases, options, say)
    for name in ("qwen3-0.6b", "qwen3-14b"):
        if f"mix-{name.removeprefix('qwen3-')}" in cases:
            free()
            mix(name, options, say)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
