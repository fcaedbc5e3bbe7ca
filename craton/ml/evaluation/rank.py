"""The process of a run of kind eval: opens suite, model and verifiers, and keeps problems.jsonl and evaluation.json.

It continues from every problem that problems.jsonl has, and asks those again that have a sample without a verdict: the
reason may be gone. evaluation.json is written again and again, and so is a metric for each problem:
`run_evaluation_accuracy` of the setting in work, at times with its interval.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from craton.agent.processes import EXIT_FINAL
from craton.errors import CratonError
from craton.job import Job, load_job
from craton.job.model import chat_folder
from craton.job.sections.posttraining import RewardTerm
from craton.job.sections.suites import load_suite
from craton.ml.evaluation.problems import open_problems
from craton.ml.evaluation.records import PROBLEMS_FILE, ProblemFile, ProblemResult
from craton.ml.evaluation.results import EVALUATION_FILE, EvaluationPrices, summarize_results, write_evaluation
from craton.ml.evaluation.runner import EvaluationSetting, SuiteRunner, plain_setting
from craton.ml.evaluation.statistics import accuracy_interval
from craton.ml.evaluation.target import EvaluationTarget
from craton.ml.serving.clients import EndpointUnavailableError
from craton.ml.serving.strategies import PoolScorer, Prices, Scorer
from craton.ml.verifiers import RewardModelProcess, RewardModelSetup, VerifierPool
from craton.telemetry import RunDirectory, read_json
from craton.telemetry.error_reports import report_exception
from craton.telemetry.files import STORAGE_ERRORS, replace_text
from craton.telemetry.rank import LedgerClock, Recorder

WRITE_SECONDS = 5.0  # between two versions of evaluation.json
BEAT_SECONDS = 1.0  # well below the seconds after which a rank in a step counts as stuck
PATIENCE_SECONDS = 1800.0  # without a beat of the event loop, after which the agent restarts the rank
STATE_FILE = "checkpoints.json"  # the steps that were chosen at the first start
EXIT_RETRY = 1
HOURS_PER_DAY = 24.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate; return the exit status."""
    (folder,) = sys.argv[1:] if arguments is None else arguments
    run = RunDirectory(folder)
    recorder, clock = Recorder.from_environment(run), LedgerClock()
    try:
        evaluation = SuiteEvaluation(load_job(run.job_path), run, recorder, clock)
        asyncio.run(evaluation.run())
        return 0
    except Exception as error:  # noqa: BLE001 -- every error is reported, and turned into the exit status
        report = report_exception(error)
        is_ours = isinstance(error, CratonError)
        recorder.event(
            "failed", step=clock.page.step, reason=str(error) if is_ours else report.line, error=report.to_fields()
        )
        if not is_ours:
            traceback.print_exception(error)
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_FINAL if is_ours and not isinstance(error, EndpointUnavailableError) else EXIT_RETRY


@dataclass
class _Part:
    """One setting, and the results that it has."""

    setting: EvaluationSetting
    results: list[ProblemResult] = field(default_factory=list)


class SuiteEvaluation:
    """One evaluation: all settings of a job, one after the other, so that each has its own speed and cost."""

    def __init__(self, job: Job, run: RunDirectory, recorder: Recorder, clock: LedgerClock) -> None:
        assert job.eval is not None
        self._job, self._run, self._recorder, self._clock = job, run, recorder, clock
        self._suite = load_suite(job.eval.suite)
        self._problems = open_problems(self._suite, job.eval.problems)
        self._target = EvaluationTarget(job, lambda stage: recorder.event("evaluating", stage=stage))
        self._parts = [_Part(setting) for setting in self._settings()]
        self._file = ProblemFile(run.path / PROBLEMS_FILE)
        self._prices = _prices(job, run)
        self._written = -WRITE_SECONDS
        self._shown: _Part | None = None  # the setting whose interval was recorded last
        self._num_shown = 0  # and of how many problems
        self._has_seeds = bool(read_json(run.path / EVALUATION_FILE).get("has_seeds", True))
        self._started, self._done_before = 0.0, 0  # of the checkpoint in work

    async def run(self) -> None:
        self._collect()
        total = len(self._parts) * len(self._problems)
        if self._num_done < total:
            with VerifierPool(self._suite.reward, self._suite.verify, _job_folder()) as pool:
                for checkpoint in dict.fromkeys(part.setting.checkpoint for part in self._parts):
                    await self._evaluate_checkpoint(checkpoint, pool)
        await self._until_saved()
        while not self._write(is_last=True):
            self._clock.page.beat()
            await asyncio.sleep(BEAT_SECONDS)
        self._file.close()
        for part in self._parts:
            print(f"{part.setting.words}: {self._words(part)}", flush=True)

    async def _evaluate_checkpoint(self, checkpoint: int | None, pool: VerifierPool) -> None:
        section = self._job.eval
        assert section is not None
        parts = [part for part in self._parts if part.setting.checkpoint == checkpoint]
        if all(len(part.results) == len(self._problems) for part in parts):
            return
        slots = max(section.concurrency, *(part.setting.num_in_flight for part in parts))
        self._clock.switch("restore")
        async with self._target.client(checkpoint, slots) as client:
            self._clock.switch("productive")
            self._clock.page.patience = PATIENCE_SECONDS
            self._has_seeds = (await client.capabilities()).seeds
            self._started, self._done_before = time.monotonic(), self._num_done
            beat = asyncio.create_task(self._beat())
            try:
                for part in parts:  # before the first of them costs anything
                    await SuiteRunner(client, pool, 1, has_seeds=self._has_seeds).require(
                        part.setting, self._problems[0]
                    )
                for part in parts:
                    done = {result.digest for result in part.results}
                    left = [problem for problem in self._problems if problem.digest not in done]
                    with self._scorer(part.setting, pool) as scorer:
                        prices = None if section.price is None else Prices(*section.price)
                        runner = SuiteRunner(client, pool, section.concurrency, scorer, prices, self._has_seeds)
                        runner.on_result = partial(self._take, part)
                        runner.on_beat = self._clock.page.beat
                        runner.until_saved = self._until_saved
                        await runner.run(part.setting, left, part.results)
            finally:
                beat.cancel()

    @contextmanager
    def _scorer(self, setting: EvaluationSetting, pool: VerifierPool) -> Iterator[Scorer | None]:
        """Open what scores the samples of a setting's strategy: a verifier of the suite, or one of its own."""
        term = None if setting.strategy is None else self._suite.score_of(setting.strategy)
        if term is None:
            yield None
        elif term in self._suite.reward:
            yield PoolScorer(pool, self._suite.reward.index(term))
        elif term.model is not None:
            with self._reward_model(term) as model:
                yield PoolScorer(model)
        else:
            with VerifierPool([term], self._suite.verify, _job_folder()) as own:
                yield PoolScorer(own)

    def _reward_model(self, term: RewardTerm) -> RewardModelProcess:
        """Start a reward model on the CPU of this machine. Chats are rendered as for the evaluated model, if they have
        one vocabulary and the reward model has no chat template."""
        assert term.model is not None
        assert self._job.eval is not None
        folder = Path(term.model)
        chats = chat_folder(folder, None if self._job.eval.endpoint is not None else self._job.weights_folder)
        limit = self._suite.verify.limit
        setup = RewardModelSetup(str(folder), None if chats is None else str(chats), limit)
        return RewardModelProcess(term.name, setup, term.weight)

    def _settings(self) -> list[EvaluationSetting]:
        section = self._job.eval
        assert section is not None
        sampling = self._suite.sampling.changed(
            samples=section.samples,
            temperature=section.temperature,
            max_tokens=section.max_tokens,
            seed=section.seed,
        )
        strategies = self._suite.strategies if section.strategies is None else section.strategies
        plain = plain_setting(self._job.evaluated_name, self._suite, sampling)
        settings = [plain]
        for strategy in strategies:
            temperature = sampling.temperature_for(strategy.num_samples)
            settings.append(replace(plain, samples=1, temperature=temperature, strategy=strategy))
        return [replace(setting, checkpoint=step) for step in self._checkpoints() for setting in settings]

    def _checkpoints(self) -> list[int | None]:
        """Return the checkpoints of the first start of this run: later ones are not evaluated half way."""
        path = self._run.path / STATE_FILE
        known = read_json(path).get("checkpoints")
        if isinstance(known, list) and known:
            return known
        found = self._target.checkpoints
        replace_text(path, json.dumps({"checkpoints": found}) + "\n")
        return found

    def _collect(self) -> None:
        """Take the results that earlier generations have written."""
        for part in self._parts:
            digest = part.setting.digest
            found = [self._file.find(digest, problem.digest) for problem in self._problems]
            part.results = [result for result in found if result is not None and not result.num_failures]

    @property
    def _num_done(self) -> int:
        return sum(len(part.results) for part in self._parts)

    def _take(self, part: _Part, result: ProblemResult) -> None:
        self._file.add(result)
        part.results.append(result)
        done, total = self._num_done, len(self._parts) * len(self._problems)
        shares = [found.share for found in part.results if found.share is not None]
        seconds = (time.monotonic() - self._started) / (done - self._done_before)
        entry: dict[str, Any] = {"run_steps": total, "run_step_seconds": seconds}
        is_due = time.monotonic() - self._written > WRITE_SECONDS
        is_last = len(part.results) == len(self._problems)
        if shares:
            entry["run_evaluation_accuracy"] = sum(shares) / len(shares)
        # The bootstrap over problems is too slow for every result, and an interval must not stand beside an accuracy of
        # another setting, or of far more problems.
        is_old = part is not self._shown or len(part.results) >= 2 * self._num_shown
        if shares and (is_old or is_due or is_last):
            self._shown, self._num_shown = part, len(part.results)
            is_single = all(len(found.samples) == 1 for found in part.results if found.share is not None)
            low, high = accuracy_interval(shares, is_single)
            entry |= {"run_evaluation_accuracy_low": low, "run_evaluation_accuracy_high": high}
        samples = [sample for found in part.results for sample in found.samples]
        entry["run_evaluation_failure_share"] = sum(sample.is_right is None for sample in samples) / len(samples)
        self._clock.page.step, self._clock.page.step_seconds = done, seconds
        self._recorder.metrics(done, **entry)
        self._clock.page.beat()
        if is_due:
            self._write()
            print(f"{done:,} of {total:,} problems; {part.setting.words}: {self._words(part)}", flush=True)

    async def _until_saved(self) -> None:
        """Wait while the disk takes no results: what was asked and paid for is kept, and nothing more is asked."""
        while not self._file.is_written():
            self._clock.page.beat()
            await asyncio.sleep(BEAT_SECONDS)

    async def _beat(self) -> None:
        while True:
            self._clock.page.beat()
            await asyncio.sleep(BEAT_SECONDS)

    def _words(self, part: _Part) -> str:
        entry = self._entry(part)
        accuracy, low, high = entry["accuracy"], entry["low"], entry["high"]
        if accuracy is None:
            return "no verdicts yet"
        return f"accuracy {accuracy:.3f} ({low:.3f} to {high:.3f})"

    def _entry(self, part: _Part) -> dict[str, Any]:
        setting = part.setting
        order = {problem.digest: problem.index for problem in self._problems}
        results = sorted(part.results, key=lambda result: order[result.digest])
        entry = summarize_results(results, setting.strategy_json, setting.n, self._prices, len(self._problems))
        return {**entry, "settings": setting.digest, "checkpoint": setting.checkpoint, "words": setting.words}

    def _write(self, is_last: bool = False) -> bool:
        """Write evaluation.json; False if the disk refuses it, which the agent reports."""
        document = {
            "suite": self._suite.name,
            "model": self._job.evaluated_name,
            "num_problems": len(self._problems),
            "is_done": is_last,
            "has_seeds": self._has_seeds,
            "strategies": [self._entry(part) for part in self._parts if part.results],
        }
        self._written = time.monotonic()
        try:
            write_evaluation(self._run.path / EVALUATION_FILE, document)
        except OSError as error:
            if error.errno not in STORAGE_ERRORS:
                raise
            return False
        return True


def _job_folder() -> Path:
    """Return the folder of the user's functions."""
    return Path(os.environ.get("CRATON_JOB_FOLDER") or ".").absolute()


def _prices(job: Job, run: RunDirectory) -> EvaluationPrices:
    assert job.eval is not None
    if job.eval.price is not None:
        return EvaluationPrices(*job.eval.price)
    daily = read_json(run.launch_path).get("dollars_per_day")
    return EvaluationPrices(per_hour=None if daily is None else float(daily) / HOURS_PER_DAY)
