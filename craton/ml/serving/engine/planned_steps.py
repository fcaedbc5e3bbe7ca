"""What the last steps of an engine should take: as plans predict them, and at the roofline.

A step is recorded as a few numbers. Its times are computed only when they are asked for, all steps at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from craton.planning.serving import ServedSteps, roofline_steps

if TYPE_CHECKING:
    from craton.ml.serving.schedule import DraftInput, ScheduledStep


class BatchWork(NamedTuple):
    """The work of a step. A request in decode has one row, and one for each draft token."""

    rows: int  # of requests in decode
    context_tokens: int  # of these rows, each counted once that is read
    prefill_tokens: int
    prefill_pairs: float  # of queries and keys
    ended_prompts: int
    first_rows: int = 0  # of the draft model's first pass, which also catches up
    first_context_tokens: int = 0
    draft_requests: int = 0
    draft_context_tokens: int = 0
    draft_tokens: int = 0  # of each request


def batch_work(step: ScheduledStep, drafts: DraftInput | None = None) -> BatchWork:
    """Return the work of a scheduled step."""
    decode = [part for part in step.parts if part.count == 1 + part.drafts]
    prefill = [part for part in step.parts if part.count != 1 + part.drafts]
    work = BatchWork(
        rows=sum(part.count for part in decode),
        context_tokens=sum(part.begin + part.count for part in decode) - step.saved_tokens,
        prefill_tokens=sum(part.count for part in prefill),
        prefill_pairs=sum(part.count * (part.begin + (part.count + 1) / 2) for part in prefill),
        ended_prompts=sum(part.samples for part in prefill),
    )
    if drafts is None:
        return work
    return work._replace(
        first_rows=int(drafts.counts.sum()),
        first_context_tokens=int(drafts.ends.sum()),
        draft_requests=drafts.requests,
        draft_context_tokens=int(drafts.ends[: drafts.requests].sum()),
        draft_tokens=drafts.length,
    )


class PlannedSteps:
    """Step times of a model, and of its draft model."""

    def __init__(self, model: ServedSteps, draft: ServedSteps | None = None) -> None:
        self.model, self.draft = model, draft

    def mean_seconds(self, steps: Sequence[BatchWork]) -> float:
        """Return the predicted mean time of these steps."""
        return _mean_seconds(self.model, self.draft, steps)

    def mean_roofline_seconds(self, steps: Sequence[BatchWork]) -> float:
        """Return the mean of their minimum times."""
        draft = None if self.draft is None else roofline_steps(self.draft)
        return _mean_seconds(roofline_steps(self.model), draft, steps)


def _mean_seconds(model: ServedSteps, draft: ServedSteps | None, steps: Sequence[BatchWork]) -> float:
    if not steps:
        return 0.0
    work = BatchWork(*np.array(steps, float).T)
    prompt = 2.0 * work.prefill_pairs / np.maximum(work.prefill_tokens, 1.0)
    context = work.context_tokens / np.maximum(work.rows, 1.0)
    seconds = model.mixed_seconds(work.rows, context, work.prefill_tokens, prompt, chunks=work.ended_prompts)
    if draft is not None:
        drafted = work.draft_tokens > 0
        first = draft.decode_seconds(work.first_rows, work.first_context_tokens / np.maximum(work.first_rows, 1.0))
        requests = np.maximum(work.draft_requests, 1.0)
        further = draft.decode_seconds(requests, work.draft_context_tokens / requests + work.draft_tokens / 2.0)
        seconds = seconds + drafted * (first + np.maximum(work.draft_tokens - 1.0, 0.0) * further)
    return float(np.mean(seconds))
