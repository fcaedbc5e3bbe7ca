"""The last save of a run shows how far it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import make_trainer, tiny_job
from waiting import wait_until

from craton.ml.training import last_save
from craton.ml.training.checkpoint.lane import TierLane
from craton.ml.training.last_save import progress_text


def test_a_long_save_reports_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_save, "PROGRESS_SECONDS", 0.01)
    trainer, records = make_trainer(tiny_job(2), folder=tmp_path)
    end = TierLane._end

    def reports() -> list[dict[str, Any]]:
        return [fields for name, _, fields in records.events if name == "checkpoint_progress"]

    def slow_end(self: TierLane, *arguments: Any) -> Any:
        wait_until(lambda: bool(reports()), "the progress of the save is reported")
        return end(self, *arguments)

    monkeypatch.setattr(TierLane, "_end", slow_end)
    trainer.fit()
    assert reports()[0]["tier"] == "shared"
    assert " of " in reports()[0]["reason"]


def test_progress_reads_like_this() -> None:
    text = progress_text(6_210_000_000, 14_800_000_000, 5.2)
    assert text == "6.21 GB of 14.8 GB (42%), 1.19 GB/s, 7 s left"
    assert progress_text(0, 100, 1.0) == "0 B of 100 B (0%), 0 B/s"
