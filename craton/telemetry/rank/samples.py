"""A few sample texts of every step with their verdicts, for people to read: RUN/samples/NODE.jsonl.

One process per node writes them; that of rank 0 also writes which samples each step trains. Recording never blocks or
raises; lines wait in bounded memory while the disk is full. Texts are shortened, and the file keeps the
newest half once it has MAX_BYTES.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from craton.telemetry.files import LineWriter, tail_lines
from craton.telemetry.rundirectory import RunDirectory

PER_STEP = 4  # samples recorded of a step
MAX_TEXT = 4000  # characters of a prompt or a completion: the beginning and the end are kept
MAX_ERROR = 500
MAX_PARTS = 16  # reward terms
MAX_VERSIONS = 16  # weight versions of one completion
MAX_BYTES = 16 << 20
FIELDS = ("prompt", "completion", "reward", "parts", "error", "tokens", "versions")  # besides time, step, generation


class SampleRecorder:
    """Records the samples of one node; `is_full` tells that the step has enough."""

    def __init__(self, run: RunDirectory, node: str, generation: int, per_step: int = PER_STEP) -> None:
        self._path = run.samples_path(node)
        self._generation, self._per_step = generation, per_step
        self._step, self._recorded = -1, 0
        self._writer = LineWriter(self._path)
        with contextlib.suppress(OSError):  # a refusing disk: the writer keeps trying
            self._path.parent.mkdir(exist_ok=True)

    def is_full(self, step: int) -> bool:
        """Whether this step has its samples already, so that their texts need not be decoded."""
        return step == self._step and self._recorded >= self._per_step

    def record(
        self,
        step: int,
        prompt: str | Sequence[Mapping[str, Any]],
        completion: str,
        reward: float | None,
        parts: Mapping[str, float | None] | None = None,
        error: str = "",
        tokens: int = 0,
        versions: Sequence[int] = (),
    ) -> None:
        """Record one sample, unless the step has enough. `reward` None: no verdict, and `error` says why. `tokens` were
        generated; `versions`: weight versions that generated them."""
        if self.is_full(step):
            return
        if step != self._step:
            self._step, self._recorded = step, 0
        self._recorded += 1
        known = list(dict.fromkeys(int(version) for version in versions))
        line = {
            "time": time.time(),
            "step": step,
            "generation": self._generation,
            "prompt": shortened(prompt if isinstance(prompt, str) else _messages_text(prompt)),
            "completion": shortened(completion),
            "reward": _finite(reward),
            "parts": {str(name)[:MAX_ERROR]: _finite(value) for name, value in list((parts or {}).items())[:MAX_PARTS]},
            "error": shortened(error, MAX_ERROR),
            "tokens": int(tokens),
            "versions": known[-MAX_VERSIONS:],
        }
        self._shrink()
        self._writer.append([json.dumps(line, separators=(",", ":")).encode()])

    def record_trained(self, step: int, samples: Mapping[int, int]) -> None:
        """Record which samples a step trains: prompt index → copies. The newest line of a step counts."""
        line = {
            "time": time.time(),
            "step": step,
            "generation": self._generation,
            "trained": {str(index): copies for index, copies in samples.items()},
        }
        self._shrink()
        self._writer.append([json.dumps(line, separators=(",", ":")).encode()])

    def close(self) -> None:
        self._writer.close()

    def _shrink(self) -> None:
        """Keep the newest half of a file that has become too long."""
        with contextlib.suppress(OSError):
            if self._path.lstat().st_size < MAX_BYTES:
                return
            self._writer.close()
            fresh = self._path.with_suffix(".partial")
            with open(fresh, "w", encoding="utf-8") as file:
                for line in tail_lines(self._path, MAX_BYTES // 2):
                    file.write(json.dumps(line, separators=(",", ":")) + "\n")
            os.replace(fresh, self._path)


def read_samples(paths: Sequence[Path], max_samples: int, max_bytes: int = 512 << 10) -> list[dict[str, Any]]:
    """Return the newest samples of these files, newest first. Torn lines and fields of another type are skipped: anyone
    with write access to the run may have written them."""
    lines = [line for path in paths for line in tail_lines(path, max_bytes)]
    samples = [sample for line in lines if (sample := _checked(line)) is not None]
    samples.sort(key=lambda sample: (sample["step"], sample["time"]), reverse=True)
    return samples[:max_samples]


def shortened(text: str, most: int = MAX_TEXT) -> str:
    """Return a text of at most about `most` characters: its beginning, how much is left out, its end."""
    if len(text) <= most:
        return text
    head, tail = most * 2 // 3, most // 3
    return f"{text[:head]} … {len(text) - head - tail:,} characters … {text[-tail:]}"


def _checked(line: Mapping[str, Any]) -> dict[str, Any] | None:
    step, prompt, completion = (line.get(name) for name in ("step", "prompt", "completion"))
    if type(step) is not int or not isinstance(prompt, str) or not isinstance(completion, str):
        return None
    parts, versions, tokens = line.get("parts"), line.get("versions"), line.get("tokens")
    return {
        "time": _finite(line.get("time")) or 0.0,
        "step": step,
        "prompt": shortened(prompt),
        "completion": shortened(completion),
        "reward": _finite(line.get("reward")),
        "parts": {name: _finite(value) for name, value in parts.items()} if isinstance(parts, dict) else {},
        "error": shortened(str(line.get("error") or ""), MAX_ERROR),
        "tokens": tokens if type(tokens) is int else None,
        "versions": [version for version in versions if type(version) is int] if isinstance(versions, list) else [],
    }


def _messages_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a chat as text: `user: …`, a message per line."""
    return "\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in messages)


def _finite(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None  # type: ignore[arg-type]
