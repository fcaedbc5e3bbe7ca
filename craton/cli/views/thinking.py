"""What `craton think` reads from its options, runs and prints."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from craton import formatting
from craton.cli.views.progress import progress
from craton.errors import CratonError
from craton.extras import require_extra
from craton.job.document import Section, parse_seconds, parse_section, read_document
from craton.job.model import chat_folder, check_reward_model
from craton.job.sections.posttraining import VERIFIERS, RewardTerm, VerifySection
from craton.job.sections.strategy import LOGPROBS, Strategy, check_score, parse_strategy, read_strategy
from craton.ml.serving import Sampling
from craton.ml.serving.clients import (
    AnswerTimeoutError,
    BrokenStreamError,
    EndpointUnavailableError,
    InferenceRequest,
    ProtocolError,
    ServerFailedError,
    connect,
)
from craton.ml.serving.strategies import (
    Limits,
    PoolScorer,
    Prices,
    Progress,
    Scorer,
    StrategyOutcome,
    run_strategy,
)
from craton.ml.verifiers import RewardModelProcess, RewardModelSetup, VerifierPool
from craton.nearest import did_you_mean

FAILURES = (EndpointUnavailableError, ServerFailedError, BrokenStreamError, AnswerTimeoutError, ProtocolError)


class ThinkError(CratonError):
    """An option of `craton think` is wrong."""


class VerifierFile(Section):
    """The file of --verifier."""

    verifiers: dict[str, RewardTerm]
    verify: VerifySection = VerifySection()


@dataclass(frozen=True)
class ThinkRequest:
    """The options as they were given."""

    url: str
    strategy: str
    prompt: str | None
    file: Path | None
    system: str | None
    is_completion: bool
    model: str | None
    key: str | None
    verifier: str | None
    answer: str | None
    sample_tokens: int
    temperature: float
    seed: int | None
    max_tokens: int | None
    max_seconds: str | None
    max_dollars: float | None
    price: str | None


def run_think(asked: ThinkRequest, as_json: bool) -> None:
    """Run the strategy and print its outcome."""
    require_extra("serve", "think", ("aiohttp",))
    request = _request(asked)
    terms = _verifiers(asked.verifier)
    strategy = _strategy(asked, terms)
    limits = _limits(asked, strategy)
    api_key = os.environ.get(asked.key, "") if asked.key else None
    if asked.key and not api_key:
        raise ThinkError(f"--key: the variable {asked.key} is not set; set it to the endpoint's API key")
    row = {} if asked.answer is None else {"answer": asked.answer}

    async def work(scorer: Scorer | None) -> StrategyOutcome:
        options = {"model": asked.model, "api_key": api_key}
        async with await connect(asked.url, **options) as client:
            with progress(f"think {strategy.kind}") as report:

                def show(state: Progress) -> None:
                    report(state.samples, state.num_samples, state.note)

                return await run_strategy(client, request, strategy, scorer, limits, show, row=row)

    with ExitStack() as stack:
        scorer = _scorer(terms, strategy, not asked.is_completion, stack)
        try:
            outcome = asyncio.run(work(scorer))
        except FAILURES as error:  # the endpoint's fault, not a mistake in the options: exit code 1
            raise ConnectionError(str(error)) from None
    print(json.dumps(outcome_json(strategy, outcome)) if as_json else outcome_text(outcome))


def outcome_json(strategy: Strategy, outcome: StrategyOutcome) -> dict[str, Any]:
    return {
        "answer": outcome.text,
        "reasoning": outcome.reasoning,
        "finish": outcome.finish,
        "limited_by": outcome.limited_by,
        "strategy": strategy.model_dump(mode="json", exclude_none=True),
        "report": outcome.report,
        "usage": asdict(outcome.usage),
        "seconds": outcome.seconds,
        "dollars": outcome.dollars,
        "samples": [
            {
                "text": sample.text,
                "tokens": sample.num_tokens,
                "finish": sample.finish,
                "score": sample.score,
                "counted": sample.counted,
            }
            for sample in outcome.samples
        ],
    }


def outcome_text(outcome: StrategyOutcome) -> str:
    """Return the answer, a table of votes or scores, and one line with what it took."""
    usage = outcome.usage
    lines = [outcome.text.strip(), ""]
    if outcome.report.get("votes"):
        rows = [(answer, str(count)) for answer, count in outcome.report["votes"].items()]
        lines += _table(("answer", "votes"), rows)
    elif any(sample.score is not None for sample in outcome.samples):
        lines += _table(
            ("sample", "score", "tokens", "end"),
            [
                (str(sample.index), "none" if sample.score is None else f"{sample.score:.4g}", str(sample.num_tokens),
                 sample.finish or "open")
                for sample in outcome.samples
            ],
        )  # fmt: skip
    elif outcome.report.get("without_answer") and outcome.samples:
        lines.append("no sample has an answer to count, so this is the first; set e.g. {kind: vote, answer: text}")
    if outcome.report.get("stopped_early"):
        confidence = formatting.percent(outcome.report["confidence"])
        lines.append(f"stopped after {len(outcome.samples)} of {outcome.report['n']} samples: {confidence} certain")
    if outcome.reasoning is not None:
        lines.append(f"{outcome.report['thinking_tokens']:,} thinking tokens, {outcome.report['waits']} × wait")
    if outcome.limited_by:
        lines.append(f"ended by the limit in {outcome.limited_by}; this is what was reached")
    cost = "" if outcome.dollars is None else f", {formatting.small_dollars(outcome.dollars)}"
    lines.append(
        f"{usage.chosen_tokens:,} tokens chosen, {usage.discarded_tokens:,} discarded, "
        f"{usage.prompt_tokens:,} of prompts, {formatting.duration(outcome.seconds)}{cost}"
    )
    return "\n".join(lines)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    rows = [tuple(cell if len(cell) <= 60 else f"{cell[:59]}…" for cell in row) for row in rows]
    widths = [max(len(row[place]) for row in (head, *rows)) for place in range(len(head))]
    padded = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    return [*(line.rstrip() for line in padded), ""]


def _request(asked: ThinkRequest) -> InferenceRequest:
    if (asked.prompt is None) == (asked.file is None):
        raise ThinkError("give the prompt with either --prompt or --file")
    if asked.file is not None:
        try:
            text = asked.file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ThinkError(f"--file: {asked.file} is not UTF-8; save it as UTF-8") from None
    else:
        text = asked.prompt or ""
    if not text.strip():
        raise ThinkError("the prompt is empty; write one")
    sampling = Sampling(asked.sample_tokens, asked.temperature, seed=asked.seed)
    if asked.is_completion:
        if asked.system is not None:
            raise ThinkError("--system is a message of a chat; remove it, or remove --completion")
        return InferenceRequest(text, sampling)
    system = [] if asked.system is None else [{"role": "system", "content": asked.system}]
    return InferenceRequest([*system, {"role": "user", "content": text}], sampling)


def _strategy(asked: ThinkRequest, terms: VerifierFile) -> Strategy:
    """Return the strategy. A score that it does not name is that of the only verifier."""
    strategy = parse_strategy(read_strategy(asked.strategy, "--strategy"), "--strategy")
    if (
        len(terms.verifiers) == 1
        and "score" in type(strategy).model_fields
        and "score" not in strategy.model_fields_set
    ):
        strategy = strategy.model_copy(update={"score": next(iter(terms.verifiers))})
    if strategy.verifier is not None and not terms.verifiers:
        raise ThinkError(
            f"--strategy: {strategy.verifier!r} is not known; name it with --verifier, or use {LOGPROBS} as score"
        )
    check_score(strategy, terms.verifiers, "--strategy")
    return strategy


def _limits(asked: ThinkRequest, strategy: Strategy) -> Limits:
    prices = None if asked.price is None else _prices(asked.price)
    if prices is None and (asked.max_dollars is not None or strategy.max_dollars is not None):
        raise ThinkError("--max-dollars needs the endpoint's prices; add --price IN,OUT in dollars per million tokens")
    if asked.max_dollars is not None and not 0 < asked.max_dollars < float("inf"):
        raise ThinkError(f"--max-dollars: {asked.max_dollars:g} is not an amount above 0; write e.g. 0.05")
    try:
        seconds = None if asked.max_seconds is None else parse_seconds(asked.max_seconds)
    except ValueError as error:
        raise ThinkError(f"--max-seconds: {error}") from None
    return Limits(asked.max_tokens, seconds, asked.max_dollars, prices)


def _prices(text: str) -> Prices:
    try:
        prompt, completion = (float(part) for part in text.split(","))
    except ValueError:
        prompt = completion = -1.0
    if not (0 <= prompt < float("inf") and 0 <= completion < float("inf")):
        raise ThinkError(f"--price: {text!r} is not IN,OUT; write dollars per million tokens, e.g. 0.15,0.60")
    return Prices(prompt, completion)


def _verifiers(given: str | None) -> VerifierFile:
    if given is None:
        return VerifierFile(verifiers={})
    if Path(given).suffix in (".yaml", ".yml"):
        return parse_section(VerifierFile, read_document(given))
    if given not in VERIFIERS or given == "judge":
        hint = "; a judge needs its endpoint, in a file" if given == "judge" else did_you_mean(given, VERIFIERS)
        known = ", ".join(name for name in VERIFIERS if name != "judge")
        raise ThinkError(f"--verifier: {given!r} is not a verifier; allowed: {known}, or a YAML file{hint}")
    return VerifierFile(verifiers={given: RewardTerm(verifier=given)})


def _scorer(terms: VerifierFile, strategy: Strategy, is_chat: bool, stack: ExitStack) -> Scorer | None:
    if strategy.verifier is None:
        return None
    term = terms.verifiers[strategy.verifier]
    if term.model is not None:
        return PoolScorer(stack.enter_context(_reward_model(strategy.verifier, term, terms.verify, is_chat)))
    return PoolScorer(stack.enter_context(VerifierPool([term], terms.verify, Path.cwd())))


def _reward_model(name: str, term: RewardTerm, verify: VerifySection, is_chat: bool) -> RewardModelProcess:
    """Start a reward model on the CPU of this machine."""
    folder = Path(term.model or "")
    require_extra("serve", "a reward model", ("torch", "transformers"))
    check_reward_model(folder, None)
    if is_chat and chat_folder(folder, None) is None:
        raise ThinkError(f"--verifier: {folder} has no chat template; put a chat_template.jinja there, or --completion")
    return RewardModelProcess(name, RewardModelSetup(str(folder), limit_seconds=verify.limit), term.weight)
