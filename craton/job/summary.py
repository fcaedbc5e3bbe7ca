"""The summary of a job in one line, after checking that its model, batch and layout fit together."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from craton.formatting import count, counted
from craton.job.errors import ContentError, LayoutError
from craton.job.jobfile import Job
from craton.job.layout import Layout, check_layout, check_served_layout, layout_line, nearest_layout
from craton.job.sections import processes_per_node

OWN_SOFTWARE = "craton"  # jobs without another software profile are trained by Craton's own loop
OWN_MODEL_ONLY = ("pp", "cp", "tp", "ep")  # dimensions that a user's own model does not support


@dataclass(frozen=True)
class JobSummary:
    """A checked job. Numbers that do not apply to its kind are None."""

    name: str
    kind: str
    model: str | None
    parameters: int | None
    cluster: str
    num_gpus: int
    sequence: int | None
    global_batch_sequences: int | None
    global_batch_tokens: int | None
    steps: int | None
    total_tokens: float | None
    layout: str

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    def __str__(self) -> str:
        parts = [f"{self.name} ({self.kind})"]
        if self.model:
            size = f", {count(self.parameters)} parameters" if self.parameters else ""
            parts.append(f"{self.model}{size}")
        unit = "rank" if self.cluster.startswith("local ") else "GPU"
        parts.append(f"{self.cluster} = {self.num_gpus:,} {unit}{'' if self.num_gpus == 1 else 's'}")
        if self.global_batch_sequences and self.global_batch_tokens:
            parts.append(
                f"{self.global_batch_sequences:,} sequences of {self.sequence:,} = "
                f"{count(self.global_batch_tokens)} tokens per step"
            )
        if self.steps and self.total_tokens:
            parts.append(f"{counted(self.steps, 'step')}, {count(self.total_tokens)} tokens")
        return " · ".join([*parts, f"layout {self.layout}"])


def check_job(job: Job, num_gpus: int) -> JobSummary:
    """Return the summary of a job on `num_gpus` GPUs; ContentError with the problems of its layout."""
    shape = job.model_shape
    _check_progress(job, num_gpus)
    if job.serve and job.cluster.num_nodes > 1:
        raise ContentError(
            [
                f"{job.where('cluster')}cluster: a server runs on one node, but {job.cluster} has "
                f"{job.cluster.num_nodes}; write x 1, and start one server per node"
            ]
        )
    layout = checked_layout(job, num_gpus, trained=job.software == OWN_SOFTWARE)
    return JobSummary(
        name=job.name,
        kind=job.kind,
        model=shape.name if shape else job.model if isinstance(job.model, str) else None,
        parameters=shape.parameters if shape else None,
        cluster=str(job.cluster),
        num_gpus=layout.tp if job.serve and layout and job.cluster.is_local else num_gpus,
        sequence=job.sequence if job.train else None,
        global_batch_sequences=job.global_batch_sequences if job.train else None,
        global_batch_tokens=job.global_batch_tokens if job.train else None,
        steps=job.steps,
        total_tokens=job.total_tokens,
        layout=_layout_text(job, layout),
    )


def _check_progress(job: Job, num_gpus: int) -> None:
    """Refuse a progress.rank that does not exist; for an elastic job, on the minimum number of nodes."""
    gpus_per_node = 0 if job.cluster.is_local else num_gpus // job.cluster.num_nodes  # 0: unknown before it runs
    per_node = processes_per_node(job.command, job.processes, gpus_per_node)
    if job.progress is None or not per_node:
        return
    if problem := job.progress.rank_problem((job.cluster.min_nodes or job.cluster.num_nodes) * per_node):
        raise ContentError([f"{job.where('progress', 'rank')}{problem}"])


def _layout_text(job: Job, layout: Layout | None) -> str:
    if layout is None:
        return "auto"
    if not job.serve:
        return str(layout)
    experts = f" · ep {layout.ep}" if layout.ep > 1 else ""
    return f"tp {layout.tp}{experts} · {job.serve.precision}"


def checked_layout(job: Job, num_gpus: int, *, trained: bool) -> Layout | None:
    """Return the user's layout on `num_gpus` GPUs; None for `auto`. ContentError names its problems and the nearest
    valid layout. `trained`: by Craton's own loop, not only planned for another stack."""
    shape, where = job.model_shape, job.where("layout")
    if job.layout is None:
        return None
    if job.serve:
        return _served_layout(job, num_gpus)
    try:
        layout = job.layout.resolve(num_gpus, job.precision)
        problems = []
    except LayoutError as error:
        layout, problems = job.layout.named(job.precision), [f"{where}{error}"]
    if job.train is None:
        return _without_problems(layout, problems)
    if shape is None:
        beyond = [f"{name} {getattr(layout, name)}" for name in OWN_MODEL_ONLY if getattr(layout, name) > 1]
        if beyond:
            line = layout_line(Layout(fsdp=num_gpus, micro_batch=layout.micro_batch, recompute=layout.recompute))
            problems.append(
                f"{where}layout: {', '.join(beyond)}: a custom model supports only replicate and fsdp; write {line}"
            )
        return _without_problems(layout, problems)
    batch, sequence = job.global_batch_sequences, job.sequence
    if not problems:
        layout_problems = check_layout(layout, shape, num_gpus, batch, sequence, trained=trained)
        problems = [f"{where}layout: {problem}" for problem in layout_problems]
    if problems:
        written = job.layout.model_dump(exclude_none=True)
        near = nearest_layout(layout, shape, num_gpus, batch, sequence, trained=trained, written=written)
        if near is not None:
            problems[-1] += f"; the nearest layout that fits: `{layout_line(near)}`"
    return _without_problems(layout, problems)


def _served_layout(job: Job, num_gpus: int) -> Layout:
    """Return a server's layout: its ranks are those of tp; a local machine may have any number of ranks."""
    shape, where = job.model_shape, job.where("layout")
    assert shape is not None
    layout = job.served_layout
    problems = [f"{where}layout: {problem}" for problem in check_served_layout(layout, shape)]
    if not problems and layout.tp > num_gpus and not job.cluster.is_local:
        problems.append(f"{where}layout: tp {layout.tp} needs {layout.tp} GPUs on one node, but a node has {num_gpus}")
    return _without_problems(layout, problems)


def _without_problems(layout: Layout, problems: list[str]) -> Layout:
    if problems:
        raise ContentError(problems)
    return layout
