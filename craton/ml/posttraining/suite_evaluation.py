"""`train.evaluate.suite`: the accuracy of the trained weights on a suite, between two steps.

Each rank answers its share of the problems with an engine over the present weights, which lives as long as the
evaluation. The answers are a function of weights, suite and number of ranks. Training does not notice an evaluation: it
draws no random number, and leaves weights and optimizer as they are. Rank 0 keeps all answers and the numbers of each
step in RUN/evaluations, in the files of `craton eval`.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from craton.formatting import counted
from craton.job.sections.suites import load_suite
from craton.ml.data import tokenizer_of_run
from craton.ml.evaluation import (
    EVALUATION_FILE,
    PROBLEMS_FILE,
    EvaluationError,
    EvaluationPrices,
    EvaluationSetting,
    ProblemResult,
    SampleResult,
    SuiteProblem,
    judge_sample,
    open_problems,
    plain_setting,
    summarize_results,
    write_evaluation,
)
from craton.ml.posttraining.rollouts import wait_for
from craton.ml.posttraining.shared import RolloutEngine
from craton.ml.posttraining.verdicts import gather_objects, open_pool
from craton.ml.serving import EngineSettings
from craton.ml.serving.clients import Answer, EngineTexts, InferenceRequest, RequestRefusedError
from craton.ml.serving.device import stop_tokens_of
from craton.ml.serving.strategies import completion_length
from craton.ml.training import Recipe, TrainingInputs, TrainingSetup
from craton.ml.verifiers import VerifierSample
from craton.telemetry import read_json
from craton.telemetry.files import LineWriter

FOLDER = "evaluations"  # of the run directory
MAX_RUNNING = 256  # answers of one rank in a batch


class LeavingError(Exception):
    """This rank was asked to stop or to leave."""


def with_suite(recipe: Recipe) -> Recipe:
    """Return the recipe with the evaluation of the job's suite, if it has one."""

    def open_inputs(setup: TrainingSetup) -> TrainingInputs:
        inputs = recipe.open_inputs(setup)
        train = setup.job.train
        has_suite = train is not None and train.evaluate is not None and train.evaluate.suite is not None
        return replace(inputs, suite=TrainedSuite(setup)) if has_suite else inputs

    return Recipe(recipe.objective, open_inputs)


@dataclass(frozen=True)
class _Question:
    """A problem, and the tokens of its prompt."""

    problem: SuiteProblem
    tokens: tuple[int, ...]


class TrainedSuite:
    """The suite of a training. All ranks open it, and call its methods together."""

    def __init__(self, setup: TrainingSetup) -> None:
        job, ranks = setup.job, setup.ranks
        assert job.train is not None
        assert job.train.evaluate is not None
        wanted = job.train.evaluate
        assert wanted.suite is not None
        self._setup, self._ranks = setup, ranks
        suite = load_suite(wanted.suite)
        self._setting = plain_setting(job.name, suite, suite.sampling.changed(samples=wanted.samples))
        folder = tokenizer_of_run(job, setup.directory.path)
        if folder is None:
            raise EvaluationError(
                "train.evaluate.suite needs a tokenizer for its problems; set data.tokenizer to the model's"
            )
        self._stop_tokens, self._tokenizer_folder = stop_tokens_of(None, folder), folder
        self._questions = self._tokenized(open_problems(suite, wanted.problems))
        job_folder = Path(os.environ.get("CRATON_JOB_FOLDER") or ".").absolute()
        self._pool = open_pool(suite.reward, suite.verify, job_folder)
        self._folder = setup.directory.path / FOLDER

    def find(self, step: int) -> dict[str, float]:
        """Return the metrics of an evaluation that is done; empty if there is none of this step."""
        found = []
        if self._ranks.rank == 0:
            digest = replace(self._setting, checkpoint=step).digest
            found = [_metrics(entry) for entry in self._entries() if entry.get("settings") == digest]
        gathered = gather_objects(found, self._ranks)
        return gathered[-1] if gathered else {}

    def evaluate(self, step: int, check: Callable[[], None], is_leaving: Callable[[], bool]) -> dict[str, float]:
        """Return the metrics of the present weights; empty if any rank is leaving."""
        if any(gather_objects([is_leaving()], self._ranks)):
            return {}
        page = self._setup.clock.page

        def check_and_beat() -> None:
            page.beat()
            check()
            if is_leaving():
                raise LeavingError

        setting = replace(self._setting, checkpoint=step)
        began = time.time(), time.monotonic()
        own: list[ProblemResult] | None = None
        with self._engine(step) as engine, suppress(LeavingError):
            own = self._answered(engine, setting, began, check_and_beat)
        shares = gather_objects([own], self._ranks)  # waits for the slowest rank
        if any(share is None for share in shares):
            return {}
        results = sorted((result for share in shares for result in share or ()), key=lambda result: result.problem)
        entry = summarize_results(results, setting.strategy_json, setting.n, EvaluationPrices(), len(self._questions))
        entry |= {"settings": setting.digest, "checkpoint": step, "words": setting.words}
        if self._ranks.rank == 0:
            self._record(step, results, entry)
        return _metrics(entry)

    # -- answers ------------------------------------------------------------------------------------------------------

    def _tokenized(self, problems: Sequence[SuiteProblem]) -> list[_Question]:
        """Return the problems with the tokens of their prompts. What no training can change is refused before it."""
        texts = EngineTexts.of_folder(self._tokenizer_folder)
        questions = []
        for problem in problems:
            try:
                tokens = texts.tokens(self._setting.request(problem))
            except RequestRefusedError as error:
                raise EvaluationError(f"train.evaluate.suite: problem {problem.index}: {error}") from None
            if max(tokens, default=0) >= self._setup.vocabulary:
                raise EvaluationError(
                    f"train.evaluate.suite: problem {problem.index} has the token {max(tokens):,}, and the model's "
                    f"vocabulary is {self._setup.vocabulary:,}; set data.tokenizer to the model's"
                )
            questions.append(_Question(problem, tokens))
        return questions

    @property
    def _max_length(self) -> int:
        """Tokens of prompt and answer: as many as the suite can use, within the model's limit."""
        wanted = max(len(question.tokens) for question in self._questions) + self._setting.max_tokens
        shape = self._setup.job.model_shape
        limit = shape.max_sequence if shape else 0
        return min(wanted, limit) if limit else wanted

    @contextmanager
    def _engine(self, step: int) -> Iterator[RolloutEngine]:
        """Open an engine over the present weights. Random numbers of training are those without an evaluation."""
        ranks = self._ranks
        is_gpu = ranks.device.type == "cuda"
        own_samples = -(-len(self._questions) // ranks.world) * self._setting.samples
        settings = EngineSettings(max_length=self._max_length, max_running=min(MAX_RUNNING, own_samples))
        with torch.random.fork_rng([ranks.device] if is_gpu else []):
            if is_gpu:
                torch.cuda.empty_cache()  # the KV cache takes a share of what is free
            engine = RolloutEngine(self._setup.model, ranks, settings, self._stop_tokens, self._tokenizer_folder)
            try:
                engine.refresh(step)
                yield engine
            finally:
                engine.close()
                del engine
                gc.collect()  # its modules refer to each other, and training collects rarely
                if is_gpu:
                    torch.cuda.empty_cache()

    def _answered(
        self, engine: RolloutEngine, setting: EvaluationSetting, began: tuple[float, float], check: Callable[[], None]
    ) -> list[ProblemResult]:
        """Return the results of this rank's share of the problems. `began`: by the wall clock and the monotonic one."""
        own = self._questions[self._ranks.rank :: self._ranks.world]
        asked = [question for question in own if 0 < len(question.tokens) < self._max_length]
        requests = [self._request(question) for question in asked]
        answered = engine.generate(requests, check=check)
        answers = {question.problem.index: found for question, found in zip(asked, answered, strict=True)}
        results = []
        for question, samples in zip(own, self._judged(own, answers, setting, check), strict=True):
            problem = question.problem
            results.append(
                ProblemResult(
                    settings=setting.digest,
                    problem=problem.index,
                    digest=problem.digest,
                    samples=samples,
                    group=problem.group,
                    prompt_tokens=len(question.tokens) * setting.samples,
                    completion_tokens=sum(sample.tokens for sample in samples),
                    began=began[0],
                    seconds=time.monotonic() - began[1],
                    seed=problem.seed(setting.seed),
                    num_samples=setting.samples,
                )
            )
        return results

    def _request(self, question: _Question) -> InferenceRequest:
        request = self._setting.request(question.problem)
        return replace(request, prompt=question.tokens, copies=self._setting.samples)

    def _judged(
        self,
        own: Sequence[_Question],
        answers: dict[int, list[Answer]],
        setting: EvaluationSetting,
        check: Callable[[], None],
    ) -> Iterator[tuple[SampleResult, ...]]:
        """Yield the verified answers to each question; one whose prompt does not fit has none."""
        futures = {
            question.problem.index: [
                self._pool.submit(VerifierSample(question.problem.content, answer.text, question.problem.row))
                for answer in answers.get(question.problem.index, ())
            ]
            for question in own
        }
        for question in own:
            index = question.problem.index
            if index not in answers:
                length = f"the prompt has {len(question.tokens):,} tokens; 1 to {self._max_length - 1:,} are possible"
                yield (SampleResult(error=length),) * setting.samples
                continue
            verdicts = wait_for(futures[index], check)
            yield tuple(
                judge_sample(setting, verdict, answer.text, completion_length(answer), str(answer.finish or ""))
                for verdict, answer in zip(verdicts, answers[index], strict=True)
            )

    # -- records ------------------------------------------------------------------------------------------------------

    def _entries(self) -> list[dict[str, Any]]:
        entries = read_json(self._folder / EVALUATION_FILE).get("strategies")
        return entries if isinstance(entries, list) else []

    def _record(self, step: int, results: Sequence[ProblemResult], entry: dict[str, Any]) -> None:
        """Write the answers, then the numbers: an evaluation with numbers is done. A step that training repeats
        replaces its numbers."""
        others = [known for known in self._entries() if known.get("checkpoint") != step]
        entries = sorted([*others, entry], key=lambda known: int(known.get("checkpoint") or 0))
        document = {
            "suite": self._setting.suite.name,
            "model": self._setting.model,
            "num_problems": len(self._questions),
            "is_done": True,
            "strategies": entries,
        }
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            writer = LineWriter(self._folder / PROBLEMS_FILE)
            writer.append([result.to_line() for result in results])
            writer.close()
            write_evaluation(self._folder / EVALUATION_FILE, document)
        except OSError as error:  # the metrics have the numbers
            print(f"step {step}: {self._folder} cannot be written ({error.strerror})", flush=True)
        if entry["num_failures"]:
            first = "; ".join(found["error"] for found in entry["errors"])
            reason = f"{counted(entry['num_failures'], 'answer')} to the suite got no verdict; first errors: {first}"
            self._setup.recorder.event("verifier_failures", step=step, reason=reason)
            print(f"step {step}: {reason}", flush=True)


def _metrics(entry: dict[str, Any]) -> dict[str, float]:
    """Return the metrics in an entry of evaluation.json; no accuracy if no answer has a verdict."""
    names = {
        "evaluation_accuracy": "accuracy",
        "evaluation_accuracy_low": "low",
        "evaluation_accuracy_high": "high",
        "evaluation_failure_share": "failure_share",
        "evaluation_problems": "num_problems",
        "evaluation_seconds": "seconds",
    }
    found = {name: float(entry[key]) for name, key in names.items() if entry.get(key) is not None}
    samples = entry["num_evaluated"] * entry["n"]
    tokens = (entry["completion_tokens_mean"] or 0.0) * samples
    return {**found, "evaluation_tokens": float(round(tokens))}
