"""Explain a plan: the bottleneck, why other layouts lost, and the inputs the step is most sensitive to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from craton.formatting import memory, percent
from craton.job.layout import Layout
from craton.planning.fitting import linearise
from craton.planning.rates import MachineRates
from craton.planning.result import Bottleneck, Sensitivity
from craton.planning.search import Candidate
from craton.planning.software import CONSTANTS, SoftwareProfile
from craton.planning.step import TRAINING_STEP, StepModel, StepTimes, compose, stack

# Parts of a step (fields of StepTimes) by phase, with their display names.
PARTS: dict[str, dict[str, str]] = {
    "compute": {
        "gemm": "matmul",
        "experts": "expert matmul",
        "attention": "attention",
        "elementwise": "element-wise passes",
        "permute": "token permutation",
        "head": "head and loss",
        "recompute": "recompute",
        "host": "kernel launches",
        "dispatch": "expert dispatch",
    },
    "communication": {
        "tensor": "tensor parallel",
        "context": "context parallel",
        "exchange": "expert exchange",
        "shard": "weight sharding",
        "gradients": "gradient reduction",
        "bubble": "pipeline bubble",
        "send": "pipeline sends",
        "offload": "host offload",
        "straggle": "stragglers",
    },
    "optimizer": {"optimizer": "optimizer step", "overhead": "host overhead"},
}
ROLLOUT_ADVICE = {  # phase → part, what is slow, how to relieve it
    "rollout": (
        "generation",
        "The trainer waits for generated samples longer than for any part of training.",
        "rollout.mode separate with more workers, a lower rollout.max_tokens, or more GPUs",
    ),
    "reward": ("verdicts", "The verifiers take longer than training.", "more verify.workers, or a faster verifier"),
    "sync": (
        "weights for the rollouts",
        "Sending weights takes longer than training.",
        "LoRA, or fewer rollout servers",
    ),
}
USEFUL = ("gemm", "experts", "attention", "head")  # the model's own compute
LARGE = 0.08  # share of the step from which a part other than useful compute is the bottleneck
MOVE = 0.10  # sensitivity: inputs get worse by this share
SMALL_EFFECT = 0.002


def bottleneck(
    times: StepTimes,
    layout: Layout,
    machine: MachineRates,
    memory_share: float,
    goodput: float,
    data_share: float,
    blocked_share: float = 0.0,
    rollout_shares: Mapping[str, float] = MappingProxyType({}),
) -> Bottleneck:
    """Return the largest avoidable part of the step, else the largest part of the model's own compute; data or failures
    if they cost more. Shares are of the whole step, including data stalls and time blocked by checkpoints."""
    shares = {
        name: (1.0 - data_share - blocked_share - sum(rollout_shares.values()))
        * float(getattr(times, name) / times.step_seconds)
        for phase in PARTS.values()
        for name in phase
    }
    worst = max((name for name in shares if name not in USEFUL), key=lambda name: shares[name])
    if memory_share > 1.0:
        return Bottleneck(
            "infrastructure",
            "compute",
            "memory",
            0.0,
            f"The job does not fit: it needs {percent(memory_share)} of the GPU's memory.",
            "more GPUs, GPUs with more memory, more sharding (fsdp, pp, tp) or a smaller micro-batch",
        )
    around = max(rollout_shares, key=lambda phase: rollout_shares[phase], default="")
    if around and rollout_shares[around] > max(LARGE, *shares.values()):
        part, text, relief = ROLLOUT_ADVICE[around]
        return Bottleneck("ml software", around, part, rollout_shares[around], text, relief)
    if data_share > max(shares[worst], LARGE):
        return Bottleneck(
            "infrastructure",
            "data",
            "waiting for data",
            data_share,
            "The data tier cannot feed the job.",
            "copy the data to a faster tier, or buy throughput",
        )
    if 1.0 - goodput > max(shares[worst], LARGE):
        return Bottleneck(
            "orchestration",
            "checkpoint",
            "failures and recovery",
            1.0 - goodput,
            "Failures, recovery and checkpoints cost more than any part of the step.",
            "recover from peer memory, keep spare nodes, checkpoint at the best interval",
        )
    if shares[worst] < LARGE:
        largest = max(USEFUL, key=lambda name: shares[name])
        return Bottleneck(
            "infrastructure",
            "compute",
            PARTS["compute"][largest],
            shares[largest],
            f"Compute-bound: the model's own compute takes {percent(sum(shares[name] for name in USEFUL))}, no "
            f"other part over {percent(LARGE)}.",
            "a GPU, or more machines"
            if machine.gpu.generation == "cpu"
            else "a faster GPU, a lower precision (fp8), or more GPUs",
        )
    phase = next(phase for phase, names in PARTS.items() if worst in names)
    layer, text, relief = _advice(worst, layout, machine)
    return Bottleneck(layer, phase, PARTS[phase][worst], shares[worst], f"{text[0].upper()}{text[1:]}.", relief)


def _advice(part: str, layout: Layout, machine: MachineRates) -> tuple[str, str, str]:
    """Return (layer, what is slow, how to relieve it)."""
    domain, node = machine.network.nvlink_domain, machine.node_gpus
    across = "across nodes" if layout.tp * layout.cp * layout.data_parallel > domain else "inside the NVLink domain"
    if part == "tensor":
        if layout.tp > domain:
            return "infrastructure", f"TP {layout.tp} across nodes", f"use tp ≤ {domain}"
        return "infrastructure", f"TP {layout.tp} over NVLink", "a smaller tp, or a stack that overlaps it (async TP)"
    if part == "context":
        return "infrastructure", f"CP {layout.cp}", "a smaller cp, or more tokens per rank"
    if part == "exchange":
        where = "across nodes" if layout.ep > domain else "over NVLink"
        return "infrastructure", f"expert all-to-all {where}", f"ep ≤ {domain}, a larger micro-batch, or EP overlap"
    if part == "shard":
        relief = f"a larger micro-batch, or shard inside {node} GPUs and replicate (HSDP)"
        return "infrastructure", f"gathering sharded weights {across}", relief
    if part == "gradients":
        relief = "more micro-batches per step (gradient accumulation), or a sharded optimizer"
        return "infrastructure", f"reducing gradients {across}", relief
    if part == "bubble":
        relief = "more micro-batches per step, interleaving (vpp), a zero-bubble schedule or fewer stages"
        return "ml software", f"pipeline bubble of {layout.pp} stages", relief
    if part == "send":
        return (
            "infrastructure",
            "sending activations between stages",
            "fewer stages per rank (vpp), or adjacent stages in one leaf",
        )
    if part == "offload":
        return (
            "infrastructure",
            f"offload over {machine.host_link}",
            "more GPUs, or GPUs with more memory, so that nothing is offloaded",
        )
    if part == "straggle":
        return (
            "orchestration",
            f"waiting for the slowest of {layout.world // node:,} nodes",
            "place the job in one leaf, drain slow nodes",
        )
    if part == "recompute":
        relief = "more memory per rank: more sharding, a smaller micro-batch or GPUs with more memory"
        return "ml software", f"activation checkpointing (recompute {layout.recompute})", relief
    if part == "elementwise":
        return "ml software", "memory traffic of norms, activations and casts", "fused kernels (torch.compile)"
    if part in ("host", "overhead") and machine.gpu.generation == "cpu":
        return "ml software", "many operations on small tensors", "larger micro-batches, or fewer ranks"
    if part in ("host", "dispatch", "overhead"):
        relief = "CUDA graphs, larger micro-batches, fewer and larger kernels"
        return "ml software", "the host cannot launch kernels fast enough", relief
    if part == "permute":
        return "ml software", "moving tokens to and from experts", "fused permutation, a larger micro-batch"
    return "ml software", "the optimizer step", "shard the optimizer over more ranks, or use more tokens per step"


def why_lost(loser: Candidate, winner: Candidate, loser_times: StepTimes, winner_times: StepTimes) -> str:
    """Return one line: how much slower, and which part of the step causes it."""
    names = {name: text for phase in PARTS.values() for name, text in phase.items()}
    if not loser.fits:
        gain = 1.0 - loser.step_seconds / winner.step_seconds
        faster = f", would be {percent(gain)} faster" if gain > 0.005 else ""
        return f"does not fit: needs {memory(loser.memory_bytes)}{faster}"
    slower = loser.step_seconds / winner.step_seconds - 1.0
    if slower < -0.005:  # the user fixed a slower layout
        saved = {name: getattr(winner_times, name) - getattr(loser_times, name) for name in names}
        most = max(saved, key=lambda name: saved[name])
        return f"{percent(-slower)} faster: {names[most]} −{percent(saved[most] / winner.step_seconds)} of the step"
    gaps = {name: getattr(loser_times, name) - getattr(winner_times, name) for name in names}
    worst = max(gaps, key=lambda name: gaps[name])
    share = gaps[worst] / winner.step_seconds
    if slower < 0.005:
        return (
            f"equally fast, but more complex; {names[worst]} +{percent(share)}"
            if share > 0.002
            else "equally fast, but more complex"
        )
    return f"{percent(slower)} slower: {names[worst]} +{percent(share)} of the step"


def sensitivities(
    model: StepModel, machine: MachineRates, profile: SoftwareProfile, candidate: Candidate, most: int = 6
) -> list[Sensitivity]:
    """Return the inputs with the largest effect on the step: hardware rates 10% worse, constants one deviation off."""
    constants = np.exp(np.array(profile.log_constants))
    base = float(compose(candidate.terms, constants).step_seconds)
    effects = []
    rates, network = machine.rates, machine.network
    worse = 1.0 - MOVE
    slower_math = replace(
        rates,
        matrix_flops={name: worse * value for name, value in rates.matrix_flops.items()},
        peak_flops={name: worse * value for name, value in rates.peak_flops.items()},
    )
    slower_memory = replace(
        rates,
        memory_bytes_per_second=worse * rates.memory_bytes_per_second,
        streaming_bytes_per_second=worse * rates.streaming_bytes_per_second,
        elementwise_bytes_per_second=worse * rates.elementwise_bytes_per_second,
    )
    slower_network = replace(network, nic_bytes_per_second=worse * network.nic_bytes_per_second)
    slower_nvlink = replace(network, nvlink_bytes_per_second=worse * network.nvlink_bytes_per_second)
    for name, gpu, links in (
        ("matrix unit", slower_math, network),
        ("memory bandwidth", slower_memory, network),
        ("network bandwidth", rates, slower_network),
        ("NVLink bandwidth", rates, slower_nvlink),
    ):
        other = StepModel(
            model.shape,
            model.sequence,
            model.global_batch_sequences,
            gpu,
            links,
            model.traits,
            model.lora,
            model.imbalance,
            model.host_link_bytes_per_second,
            model.weights,
            model.adjacent_experts,
            model.lora_rank,
            model.graphs,
        )
        seconds = float(compose(other.terms(candidate.layout), constants).step_seconds)
        effects.append(Sensitivity(name, f"−{percent(MOVE)}", seconds / base - 1.0))
    _, jacobian = linearise(TRAINING_STEP, stack([candidate.terms]), np.array(profile.log_constants)[None, :])
    for index, constant in enumerate(CONSTANTS):
        deviation = math.sqrt(max(profile.covariance[index][index], 0.0))
        effect = abs(float(jacobian[0, index])) * deviation
        effects.append(Sensitivity(constant.name.replace("_", " "), f"±{percent(deviation)} (1 σ)", effect))
    effects = [entry for entry in effects if abs(entry.effect) > SMALL_EFFECT]
    return sorted(effects, key=lambda entry: -abs(entry.effect))[:most]
