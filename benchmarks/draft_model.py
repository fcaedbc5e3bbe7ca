"""Speed-up of one request by a draft model whose acceptance is set by construction, beside the planned speed-up.

`python benchmarks/draft_model.py [--model NAME --draft NAME] [--acceptance 0.7 …] [--tokens auto 4 …] [--json FILE]`;
default on a GPU: llama-3.1-8b with llama-3.2-1b in bf16, on a CPU: two small shapes in fp32, one thread, in seconds of
the CPU, which other processes on the machine disturb less. Weights are random, but
the layers add nothing to the residual stream and the head maps each token to the next one of a cycle, at the compute
cost of any weights. The draft model's head differs for a random share 1 - α of the cycle. So a greedy draft token is
accepted with probability α, whatever came before, and answers are known.

Planned: `craton.planning.serving.speculation` with the step times of Craton's engine on this machine, as in a server.
By step times: the same formula over the measured times of a plain step and of one whose draft tokens are all accepted.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import replace
from typing import Any

import torch

from craton.job.model import ModelShape, model_preset
from craton.ml.models import Decoder, config_from_shape
from craton.ml.serving.engine import build_runner, join_engine, measured_machine
from craton.ml.serving.engine.engine import Engine
from craton.ml.serving.messages import Sampling, Submit
from craton.ml.serving.settings import EngineSettings
from craton.planning.serving import (
    AUTO_LENGTHS,
    ServedModel,
    SpeculationCosts,
    best_draft_length,
    draft_steps,
    expected_tokens,
    own_steps,
    speculation_costs,
    speculation_speedup,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = {"layers": 12, "hidden": 512, "ffn_hidden": 2048, "heads": 8, "kv_heads": 4, "vocab": 2048}
SMALL_DRAFT = {"layers": 1, "hidden": 448, "ffn_hidden": 1344, "heads": 7, "kv_heads": 7, "vocab": 2048}
CLOCK = time.perf_counter if DEVICE.type == "cuda" else time.process_time
CYCLE = 400  # tokens, fewer than any hidden size
PROMPT = 64


def small_shape(numbers: dict[str, int], name: str) -> ModelShape:
    base = model_preset("llama-3.2-1b")
    head_dim = numbers["hidden"] // numbers["heads"]
    return replace(base, name=name, head_dim=head_dim, max_sequence=4096, tied_embeddings=False, **numbers)


def make_model(shape: ModelShape, cycle: list[int], wrong: set[int]) -> Decoder:
    """Return a model that continues the cycle, except after the tokens in `wrong`."""
    with torch.device("meta"):
        model = Decoder(config_from_shape(replace(shape, tied_embeddings=False)))
    model = model.to(torch.bfloat16 if DEVICE.type == "cuda" else torch.float32).to_empty(device=DEVICE)
    model.initialize(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("attention.output.weight", "mlp.down.weight")):
                parameter.zero_()
        for weight in (model.embedding.weight, model.head_weight):
            weight.zero_()
        axes = torch.arange(len(cycle))
        model.embedding.weight[torch.tensor(cycle), axes] = 1.0
        following = [cycle[(place + 1 + (token in wrong)) % len(cycle)] for place, token in enumerate(cycle)]
        model.head_weight[torch.tensor(following), axes] = 1.0
    return model


def seconds_of(engine: Engine, prompt: tuple[int, ...], count: int, repeats: int) -> float:
    """Return the least seconds of an answer of this many tokens, after one that warms up, and check it."""
    best = float("inf")
    for number in range(repeats + 1):
        tokens: list[int] = []
        engine.submit(Submit(number, prompt, Sampling(count, 0.0, ignore_eos=True)))
        began = CLOCK()
        while not engine.is_idle:
            for piece in engine.step():
                tokens += piece.tokens
        if number:
            best = min(best, CLOCK() - began)
    assert len(tokens) == count
    return best


class Case:
    """A model, its draft models, and the engine settings of every measurement."""

    def __init__(self, shape: ModelShape, draft_shape: ModelShape, count: int, repeats: int) -> None:
        generator = random.Random(0)
        self.cycle = generator.sample(range(min(shape.vocab, draft_shape.vocab)), CYCLE)
        self.order = generator.sample(self.cycle, CYCLE)
        self.shapes = shape, draft_shape
        self.model = make_model(shape, self.cycle, set())
        self.prompt = tuple(self.cycle[:PROMPT])
        self.count, self.repeats = count, repeats
        precision = "bf16" if DEVICE.type == "cuda" else "fp32"
        machine = measured_machine(DEVICE, self.model.norm.weight.dtype)
        drafting, verifying = ServedModel(draft_shape, precision), ServedModel(shape, precision)
        self.costs: SpeculationCosts = speculation_costs(
            own_steps(verifying, machine), draft_steps(drafting, machine), is_cpu=DEVICE.type == "cpu"
        )

    def measure(self, acceptance: float | None, tokens: int, is_auto: bool = False) -> dict[str, float]:
        """Return seconds per token, steps and acceptance; without drafts if `acceptance` is None."""
        settings = EngineSettings(max_length=2048, blocks=260, max_running=8)
        draft = None
        if acceptance is not None:
            settings = replace(settings, draft_tokens=tokens, draft_auto=is_auto)
            draft = make_model(self.shapes[1], self.cycle, set(self.order[: round((1 - acceptance) * CYCLE)]))
        runner, settings, length = build_runner(self.model, settings, draft=draft)
        engine = join_engine(runner, runner, settings, length, costs=self.costs)
        seconds = seconds_of(engine, self.prompt, self.count, self.repeats)
        stats = engine.stats()
        steps = stats.steps / (self.repeats + 1)
        return {
            "seconds": seconds,
            "seconds_per_step": seconds / steps,
            "accepted_share": stats.accepted / stats.drafted if stats.drafted else 0.0,
            "tokens_per_step": self.count / steps,
            "draft_tokens": stats.draft_tokens,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--draft")
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.7, 0.9])
    parser.add_argument("--tokens", nargs="+", default=["auto"], help="draft tokens, or auto: the planned best number")
    parser.add_argument("--count", type=int, default=512 if DEVICE.type == "cuda" else 128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json")
    options = parser.parse_args()
    shape = model_preset(options.model) if options.model else _default("llama-3.1-8b", SMALL)
    draft = model_preset(options.draft) if options.draft else _default("llama-3.2-1b", SMALL_DRAFT)
    if DEVICE.type == "cpu":
        torch.set_num_threads(1)
    case = Case(shape, draft, options.count, options.repeats)
    plain = case.measure(None, 0)
    print(f"{shape.name} with {draft.name} on {DEVICE}: {options.count / plain['seconds']:.1f} tokens/s without drafts")
    context, rows = PROMPT + options.count / 2, []
    full_steps: dict[int, float] = {}  # of steps whose draft tokens are all accepted
    for acceptance in options.acceptance:
        for wanted in options.tokens:
            best = best_draft_length(acceptance, case.costs, 1, context, AUTO_LENGTHS)
            tokens = max(1, best) if wanted == "auto" else int(wanted)
            if tokens not in full_steps:
                full_steps[tokens] = case.measure(1.0, tokens)["seconds_per_step"]
            found = case.measure(acceptance, tokens)
            row: dict[str, Any] = {
                "acceptance": acceptance,
                "draft_tokens": tokens,
                **{name: found[name] for name in ("accepted_share", "tokens_per_step")},
                "speedup": plain["seconds"] / found["seconds"],
                "planned_speedup": speculation_speedup(acceptance, tokens, case.costs, 1, context),
                "speedup_by_step_times": expected_tokens(acceptance, tokens)
                * plain["seconds_per_step"]
                / full_steps[tokens],
            }
            rows.append(row)
            print("  ".join(f"{name} {value:.3g}" for name, value in row.items()), flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"plain_tokens_per_second": options.count / plain["seconds"], "rows": rows}, file, indent=1)


def _default(preset: str, numbers: dict[str, int]) -> ModelShape:
    return model_preset(preset) if DEVICE.type == "cuda" else small_shape(numbers, f"small-{numbers['layers']}")


if __name__ == "__main__":
    main()
