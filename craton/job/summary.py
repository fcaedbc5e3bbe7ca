"""A job in one line, once its model, batch and layout are known to go together."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from craton.formatting import count, counted
from craton.job.errors import ContentError, LayoutError
from craton.job.jobfile import Job
from craton.job.layout import Layout, check_layout, check_served_layout, layout_line, nearest_layout
from craton.job.sections import processes_per_node

OWN_SOFTWARE = "craton"  # jobs that name no other stack are trained by Craton's own loop
OWN_MODEL_ONLY = ("pp", "cp", "tp", "ep")  # what a model of the user's own knows nothing of


@dataclass(frozen=True)
class JobSummary:
    """What was checked. Numbers a kind does not have are None."""

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
                f"{count(self.global_batch_tokens)} tokens a step"
            )
        if self.steps and self.total_tokens:
            parts.append(f"{counted(self.steps, 'step')}, {count(self.total_tokens)} tokens")
        return " · ".join([*parts, f"layout {self.layout}"])


def check_job(job: Job, num_gpus: int) -> JobSummary:
    """The summary of a job on so many GPUs, or a ContentError with what is wrong with its layout."""
    shape = job.model_shape
    _check_progress(job, num_gpus)
    if job.serve and job.cluster.num_nodes > 1:
        raise ContentError(
            [
                f"{job.where('cluster')}cluster: a server runs on one node, and {job.cluster} are "
                f"{job.cluster.num_nodes}; write x 1, and start as many servers as you need"
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
    """Refuse progress of a process that is never started; of an elastic job, on the fewest nodes."""
    gpus_per_node = 0 if job.cluster.is_local else num_gpus // job.cluster.num_nodes  # 0: not known before it runs
    per_node = processes_per_node(job.command, job.processes, gpus_per_node)
    if job.progress is None or not per_node:
        return
    if problem := job.progress.rank_problem((job.cluster.min_nodes or job.cluster.num_nodes) * per_node):
        raise ContentError([f"{job.where('progress', 'rank')}{problem}"])


def _layout_text(job: Job, layout: Layout | None) -> str:
    if layout is None:
        return "auto"
    return f"tp {layout.tp} · {layout.precision}" if job.serve else str(layout)


def checked_layout(job: Job, num_gpus: int, *, trained: bool) -> Layout | None:
    """The layout the user wrote, on so many GPUs; None for `auto`. A ContentError says what is wrong with it, and which
    layout is nearest. `trained`: by Craton's own loop, not only planned for another stack."""
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
                f"{where}layout: {', '.join(beyond)}: a model of your own is trained with replicate and fsdp alone; "
                f"write {line}"
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
    """A server's ranks are those of tp; a local machine without GPUs may have any number of them."""
    shape, where = job.model_shape, job.where("layout")
    assert job.layout is not None
    assert shape is not None
    layout = Layout(tp=job.layout.tp or 1, precision=job.precision)
    problems = [f"{where}layout: {problem}" for problem in check_served_layout(layout, shape)]
    if not problems and layout.tp > num_gpus and not job.cluster.is_local:
        problems.append(f"{where}layout: tp {layout.tp} needs as many GPUs on one node, and a node has {num_gpus}")
    return _without_problems(layout, problems)


def _without_problems(layout: Layout, problems: list[str]) -> Layout:
    if problems:
        raise ContentError(problems)
    return layout
