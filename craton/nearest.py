"""Suggest the allowed name nearest to a given one: `; did you mean 'auto'?`.

Matches other cases and separators, other tools' words for the same thing, prefixes, and typing errors (two letters
swapped, one missing, doubled or wrong).
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

MIN_RATIO = 0.6  # difflib similarity; below it names have little in common
MIN_PREFIX = 3  # letters
# What other tools (torchtitan, axolotl, LLaMA-Factory, TRL, DeepSpeed, SkyPilot, torchrun) call it → our names.
SYNONYMS: dict[str, tuple[str, ...]] = {
    "pretraining": ("pretrain",),
    "pt": ("pretrain",),
    "train": ("pretrain", "train"),
    "training": ("train", "pretrain"),
    "finetune": ("sft",),
    "finetuning": ("sft",),
    "instruct": ("sft",),
    "supervised": ("sft",),
    "inference": ("serve",),
    "server": ("serve",),
    "vllm": ("serve",),
    "script": ("command",),
    "torchrun": ("command",),
    "run": ("command", "run"),
    "float32": ("fp32",),
    "float": ("fp32",),
    "tf32": ("fp32",),
    "float16": ("fp16",),
    "half": ("fp16",),
    "bfloat16": ("bf16",),
    "float8": ("fp8",),
    "fp4": ("nvfp4",),
    "awq": ("int4",),
    "gptq": ("int4",),
    "w4a16": ("int4",),
    "kvcachedtype": ("kv_precision",),
    "lr": ("learning_rate",),
    "warmup": ("warmup_steps",),
    "warmupratio": ("warmup_steps",),
    "numwarmupsteps": ("warmup_steps",),
    "minlr": ("final_learning_rate",),
    "lrscheduler": ("schedule",),
    "lrschedulertype": ("schedule",),
    "scheduler": ("schedule", "scheduler"),
    "maxsteps": ("steps",),
    "numsteps": ("steps",),
    "trainsteps": ("steps",),
    "iterations": ("steps",),
    "epochs": ("steps",),
    "numepochs": ("steps",),
    "numtrainepochs": ("steps",),
    "batchsize": ("global_batch_sequences",),
    "batch": ("global_batch_sequences", "micro_batch"),
    "globalbatchsize": ("global_batch_sequences",),
    "trainbatchsize": ("global_batch_sequences",),
    "microbatchsize": ("micro_batch",),
    "localbatchsize": ("micro_batch",),
    "perdevicetrainbatchsize": ("micro_batch", "global_batch_sequences"),
    "gradientaccumulationsteps": ("global_batch_sequences",),
    "gradaccum": ("global_batch_sequences",),
    "maxgradnorm": ("clip",),
    "maxnorm": ("clip",),
    "gradclip": ("clip",),
    "gradientclipping": ("clip",),
    "dtype": ("precision",),
    "mixedprecision": ("precision",),
    "bf16": ("precision",),
    "fp16": ("precision",),
    "optim": ("optimizer",),
    "adam": ("adamw",),
    "adamw8bit": ("adamw",),
    "adamwtorch": ("adamw",),
    "seqlen": ("sequence",),
    "sequencelen": ("sequence",),
    "sequencelength": ("sequence",),
    "maxseqlen": ("sequence", "max_length"),
    "maxseqlength": ("sequence", "max_length"),
    "maxmodellen": ("max_length",),
    "contextlength": ("sequence", "max_length"),
    "blocksize": ("sequence",),
    "cutofflen": ("sequence",),
    "dataset": ("data", "path"),
    "datasets": ("data", "path"),
    "datasetpath": ("path",),
    "samplepacking": ("pack",),
    "packing": ("pack",),
    "valset": ("validation",),
    "evaldataset": ("validation",),
    "basemodel": ("model",),
    "modelname": ("model",),
    "modelnameorpath": ("model",),
    "checkpointing": ("checkpoint",),
    "gradientcheckpointing": ("recompute",),
    "activationcheckpointing": ("recompute",),
    "activationcheckpoint": ("recompute",),
    "savesteps": ("every_steps",),
    "savetotallimit": ("keep",),
    "tensorparallel": ("tp",),
    "tensorparallelsize": ("tp",),
    "tensorparalleldegree": ("tp",),
    "pipelineparallel": ("pp",),
    "pipelineparalleldegree": ("pp",),
    "contextparallel": ("cp",),
    "contextparalleldegree": ("cp",),
    "expertparallel": ("ep",),
    "dp": ("replicate", "fsdp"),
    "ddp": ("replicate",),
    "dataparallel": ("replicate", "fsdp"),
    "dataparallelshard": ("fsdp",),
    "zero3": ("fsdp",),
    "hiddensize": ("hidden",),
    "dim": ("hidden",),
    "dmodel": ("hidden",),
    "nembd": ("hidden",),
    "intermediatesize": ("ffn_hidden",),
    "numlayers": ("layers",),
    "nlayers": ("layers",),
    "numhiddenlayers": ("layers",),
    "nheads": ("heads",),
    "numheads": ("heads",),
    "numattentionheads": ("heads",),
    "numkeyvalueheads": ("kv_heads",),
    "nkvheads": ("kv_heads",),
    "vocabsize": ("vocab",),
    "envs": ("env",),
    "environment": ("env",),
    "resources": ("cluster",),
    "nodes": ("cluster",),
    "numnode": ("cluster",),
    "numnodes": ("cluster",),
    "numworkers": ("cluster",),
    "numgpus": ("cluster",),
    "gpus": ("cluster",),
    "accelerators": ("cluster",),
    "stage": ("kind",),
    "task": ("kind",),
    "nnodes": ("cluster",),
    "reportto": ("track",),
    "logger": ("track",),
    "wandb": ("track", "wandb"),
    "workingdir": ("workdir",),
    "cwd": ("workdir",),
    "entrypoint": ("command",),
    "rewardfn": ("reward",),
    "rewardfunction": ("reward",),
    "loss": ("objective",),
    "lossfn": ("objective",),
    "k8s": ("kubernetes",),
    "kube": ("kubernetes",),
    "sbatch": ("slurm",),
    "localhost": ("local",),
    "none": ("off", "none"),
    "never": ("off",),
    "false": ("off",),
    "ssd": ("nvme",),
    "disk": ("nvme", "shared"),
    "s3": ("object",),
    "lustre": ("shared",),
    "fsx": ("shared",),
    "nfs": ("shared",),
    "r": ("rank",),
    "lorar": ("rank",),
    "loraalpha": ("alpha",),
    "targetmodules": ("targets",),
}


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"`, or "" if no name is near."""
    near = nearest_names(name, allowed)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def nearest_name(name: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed name nearest to the given one, if any is near."""
    return next(iter(nearest_names(name, allowed)), None)


def nearest_names(wanted: str, allowed: Iterable[str], most: int = 3) -> list[str]:
    """Return the allowed names that may have been meant, the likeliest first; several only if they share a prefix."""
    names = list(dict.fromkeys(allowed))
    plain = _plain(wanted)
    if not plain or len(wanted) > 200:
        return []
    same = [name for name in names if _plain(name) == plain]
    synonyms = [name for name in SYNONYMS.get(plain, ()) if name in names]
    begun = [name for name in names if len(plain) >= MIN_PREFIX and _plain(name).startswith(plain)]
    if same or synonyms:
        return (same or synonyms)[:1]
    if begun:
        return begun[:most] if len(begun) <= most else begun[:1]
    typos = [name for name in names if _distance(plain, _plain(name)) <= (1 if len(plain) < 6 else 2)]
    if typos:
        return [min(typos, key=lambda name: _distance(plain, _plain(name)))]
    ratios = {name: SequenceMatcher(None, _plain(name), plain).ratio() for name in names}
    best = max(ratios, key=lambda name: ratios[name], default=None)
    return [best] if best is not None and ratios[best] >= MIN_RATIO else []


def _plain(text: str) -> str:
    """Normalize: ignore case, `-`, `_`, `.` and spaces."""
    return "".join(letter for letter in text.lower() if letter not in "-_. ")


def _distance(first: str, second: str) -> int:
    """Edit distance with letters missing, wrong or doubled, and neighbours swapped (Damerau-Levenshtein)."""
    if abs(len(first) - len(second)) > 2 or min(len(first), len(second)) < 2:
        return 99
    rows = [list(range(len(second) + 1))]
    for i, letter in enumerate(first, 1):
        row = [i]
        for j, other in enumerate(second, 1):
            cost = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == second[j - 2] and first[i - 2] == other:
                cost = min(cost, rows[-2][j - 2] + 1)
            row.append(cost)
        rows.append(row)
    return rows[-1][-1]
