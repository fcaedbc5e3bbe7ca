"""The layout that a job states for a server: whether the model and the engine allow it."""

from __future__ import annotations

from craton.job import Job, is_planned_only
from craton.job.layout import Layout, LayoutSpec, check_served_layout
from craton.job.model import ModelShape
from craton.planning.setting import PlanError

MAX_STATED_GPUS = 1024  # of one replica


def check_stated_layout(job: Job, shape: ModelShape) -> None:
    """Raise PlanError for the first size that cannot be planned. Other engines may pad widths and duplicate KV heads,
    so only Craton's own engine must split them evenly."""
    serve, spec = job.serve, job.layout
    assert serve is not None
    tp = (spec.tp if spec else None) or 1
    pp = (spec.pp if spec else None) or 1
    ranks = serve.attention_dp
    if tp * pp * ranks > MAX_STATED_GPUS:
        raise PlanError(
            f"{job.where('serve', 'attention_dp') if ranks > 1 else job.where('layout')}a replica of tp {tp:,} · "
            f"pp {pp:,} · attention_dp {ranks:,} has more than the {MAX_STATED_GPUS:,} GPUs that are planned; state "
            "smaller sizes, and serve.replicas"
        )
    problem = ""
    if not is_planned_only(job.software):
        problem = next(iter(check_served_layout(job.served_layout, shape)), "")
    elif spec is not None:
        problem = _problem(spec, shape, tp, pp, tp * ranks if spec.tp else 0)
    if problem:
        raise PlanError(f"{job.where('layout')}layout: {problem}")


def has_pools(job: Job) -> bool:
    """Return whether separate pools for prefill and decode are planned: not where the job states its replicas or their
    layout, for then each of them does both."""
    assert job.serve is not None
    return job.serve.replicas is None and job.layout is None


def no_fit_text(job: Job, shape: ModelShape, names: str) -> str:
    """Return why no layout was found: the weights are too large for those that exist, and which those are."""
    serve, spec = job.serve, job.layout
    assert serve is not None
    own = not is_planned_only(job.software)
    room = f"with serve.memory {serve.memory:g} and room for a step (serve.chunk_tokens, max_running, page)"
    remedy = "use a lower serve.precision, or instances with more GPU memory (--instances)"
    if spec and spec.tp:
        return (
            f"{shape.name} does not fit the stated layout on {names} {room}; write layout: auto or a larger tp, or "
            f"{remedy}"
        )
    text = f"{shape.name} fits no layout on {names} {room}; {remedy}"
    problem = next(iter(check_served_layout(Layout(tp=2, precision=job.precision), shape)), "") if own else ""
    if problem:
        text += f". Craton's engine cannot split it: {problem.partition(';')[0]}; engines that pad (software: vllm) can"
    return text


def _problem(spec: LayoutSpec, shape: ModelShape, tp: int, pp: int, stage: int) -> str:
    """Return what another engine cannot split; `stage`: ranks of a pipeline stage, 0: the plan chooses them."""
    ep = spec.ep or 1
    if shape.heads % tp:
        return f"tp {tp} does not divide the model's {shape.heads} heads; write a divisor"
    if pp > shape.layers:
        return f"pp {pp:,} is more than the model's {shape.layers} layers; write {shape.layers} or less"
    if ep > 1 and not shape.is_moe:
        return f"ep {ep} requires a model with experts, and {shape.name} has none; remove ep"
    if ep > 1 and shape.experts % ep:
        return f"ep {ep} does not divide the model's {shape.experts} experts; write a divisor"
    if ep > 1 and stage and stage % ep:
        return f"ep {ep} does not divide tp · attention_dp = {stage}; write a divisor, or raise serve.attention_dp"
    return ""
