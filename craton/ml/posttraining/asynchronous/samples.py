"""The samples of a step in modes overlap and separate: groups that were generated beside the training of other steps.

Every rank generates the prompt indices with index % world == rank. All ranks agree which finished groups form the batch
of a step (`choose_batch`). Rank 0 writes them into the journal before they are trained, with all that is pending. So a
run that resumes trains every prompt index exactly once, on samples at most `staleness` versions old. The version of
weights is the number of steps that have trained them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from craton.formatting import counted
from craton.job.sections.posttraining import Rollout
from craton.ml.data import PromptEncoder, PromptSource
from craton.ml.posttraining.asynchronous.completing import Completions, CompletionSettings
from craton.ml.posttraining.asynchronous.endpoints import Endpoints
from craton.ml.posttraining.asynchronous.groups import ENVIRONMENT, RolloutGroup, fingerprint_of
from craton.ml.posttraining.asynchronous.journal import Continuation, JournalEntry, RolloutJournal, continue_from
from craton.ml.posttraining.asynchronous.producer import Check, RolloutProducer
from craton.ml.posttraining.asynchronous.selection import (
    Frontier,
    GroupState,
    capacity_of,
    choose_batch,
    overdue,
)
from craton.ml.posttraining.samples import RolloutSample, StepSamples, has_unequal_rewards
from craton.ml.posttraining.synchronous import MAX_DRAWS, EqualRewardsError, step_metrics, verdicts_of
from craton.ml.posttraining.verdicts import Rewards
from craton.ml.training.parallel import Ranks
from craton.ml.verifiers import VerifierPool, judge_failures
from craton.telemetry.rank import LedgerClock

WAIT_SECONDS = 0.05  # between two questions of all ranks whether a batch can be formed
MAX_ENTRIES = 256  # of the journal, behind the oldest checkpoint

Item = TypeVar("Item")


class RolloutBackend(Protocol):
    """What generates: the engine in this process, servers, or an endpoint."""

    has_versions: bool  # False: it keeps its own weights, so staleness has no bound

    async def open(self) -> Endpoints:
        """Open the endpoints; runs on the event loop of the producer."""

    def update(self, version: int, producer: RolloutProducer, check: Check) -> None:
        """Give new weights to all endpoints. All ranks call it together; it returns once requests have them."""

    def report(self) -> None:
        """Record what happened, from the trainer's thread; raise if generation will never go on."""


class AsynchronousSamples:
    """Draws the samples of one step after another. All ranks call `draw` together."""

    def __init__(
        self,
        backend: RolloutBackend,
        settings: CompletionSettings,
        prompts: PromptSource,
        encoder: PromptEncoder,
        pool: VerifierPool | None,
        rewards: Rewards,
        rollout: Rollout,
        steps: int,
        journal: RolloutJournal,
        ranks: Ranks,
        clock: LedgerClock,
        note: Callable[[str, str], None] = lambda name, reason: None,
        oldest_checkpoint: Callable[[], int] = lambda: 0,
    ) -> None:
        """`note` records an event with its reason. `oldest_checkpoint`: entries before it are removed."""
        self._backend, self._settings, self._prompts, self._encoder = backend, settings, prompts, encoder
        self._pool, self._rewards, self._rollout, self._steps = pool, rewards, rollout, steps
        self._journal, self._ranks, self._clock, self._note = journal, ranks, clock, note
        self._oldest_checkpoint = oldest_checkpoint
        self._producer: RolloutProducer | None = None
        self._continuation: Continuation | None = None
        self._frontier = Frontier()
        self._version: int | None = None  # of the weights that generate
        self._looked = (0, 0.0, 0.0)  # tokens, idle seconds and time of the last step
        self.pending: Sequence[int] = ()

    def draw(self, first: int, check: Check) -> StepSamples:
        """Return the samples of the next step; `first`: the next prompt index, where a run resumes."""
        step = self._clock.page.step
        seconds = dict.fromkeys(("sync", "rollout", "reward"), 0.0)
        if self._continuation is None:
            self._resume(step - 1, Frontier(first, tuple(self.pending)))
        assert self._continuation is not None
        last = self._continuation.repeated[-1].step if self._continuation.repeated else 0
        if step <= last:
            entry = next(entry for entry in self._continuation.repeated if entry.step == step)
            self._frontier = entry.frontier
            if step == last:
                self._start(step, self._continuation.pending, seconds, check)
        else:
            if self._producer is None:
                self._start(step - 1, self._continuation.pending, seconds, check)
            entry = self._collect(step, seconds, check)
        self.pending = self._frontier.pending
        return self._samples(entry, seconds, check)

    def complete(
        self, prompts: PromptSource, indices: Sequence[int], seed: int, version: int, check: Check
    ) -> list[RolloutSample]:
        """Return one verified sample of each of these prompts, from all ranks, from the newest weights."""
        assert self._producer is not None
        producer, settings = self._producer, replace(self._settings, group=1, seed=seed)
        self._backend.update(version, producer, self._beating(check))
        self._version = version
        own = [RolloutGroup(index) for index in indices[self._ranks.rank :: self._ranks.world]]
        producer.complete(own, lambda endpoints: self._completions(endpoints, settings, prompts), self._beating(check))
        groups = [group for share in self._gather(own) for group in share]
        samples = [group.copies[0].sample(prompts.prompt(group.index), 0) for group in groups]
        samples.sort(key=lambda sample: sample.prompt.index)
        self._rewards.add_model_rewards(samples)
        return samples

    def close(self) -> None:
        """End generation; the next `draw` resumes from the journal."""
        if self._producer is not None:
            self._producer.close()
        self._producer = self._continuation = self._version = None

    # -- where a run resumes ------------------------------------------------------------------------------------------

    def _resume(self, step: int, saved: Frontier) -> None:
        found: list[Any] = [None]
        if self._ranks.rank == 0:
            found = [continue_from(self._journal, step, saved, self._fingerprint)]
            for problem in found[0].problems:
                self._note("journal_damaged", f"{problem}; what it had is generated again")
            if found[0].outdated:
                self._note("journal_outdated", f"{'; '.join(found[0].outdated)}: they are generated again")
        if self._ranks.world > 1:
            dist.broadcast_object_list(found, src=0)
        self._continuation = found[0]
        self._frontier = saved

    def _fingerprint(self, index: int) -> str:
        return fingerprint_of(self._prompts.prompt(index))

    def _start(self, version: int, kept: Iterable[RolloutGroup], seconds: dict[str, float], check: Check) -> None:
        """Generate what is pending after step `version`."""
        groups = {group.index: group for group in kept}
        pending = [groups.get(index, RolloutGroup(index)) for index in self._frontier.pending]
        if self._backend.has_versions:
            states = [group.state for group in pending]
            again = set(overdue(states, version, self._rollout.prompts, self._rollout.max_staleness))
            pending = [RolloutGroup(group.index) if group.index in again else group for group in pending]

        async def open_completions() -> Completions:
            return self._completions(await self._backend.open(), self._settings, self._prompts)

        self._producer = RolloutProducer(open_completions)
        self._looked = (0, 0.0, time.monotonic())
        self._update(self._clock.page.step - 1, seconds, check)
        self._begin(pending, check)

    def _update(self, version: int, seconds: dict[str, float], check: Check) -> None:
        assert self._producer is not None
        if version != self._version:
            with self._phase("sync", seconds):
                self._backend.update(version, self._producer, self._beating(check))
        self._version = version

    def _completions(self, endpoints: Endpoints, settings: CompletionSettings, prompts: PromptSource) -> Completions:
        return Completions(endpoints, settings, prompts, self._encoder, self._pool)

    def _begin(self, groups: Iterable[RolloutGroup], check: Check) -> None:
        assert self._producer is not None
        ranks = self._ranks
        self._producer.begin([group for group in groups if group.index % ranks.world == ranks.rank], check)

    # -- the batch of a step ------------------------------------------------------------------------------------------

    def _collect(self, step: int, seconds: dict[str, float], check: Check) -> JournalEntry:
        """Wait until a batch can be formed; return it, written into the journal."""
        assert self._producer is not None
        producer, check = self._producer, self._beating(check)
        self._update(step - 1, seconds, check)
        self._open(step, check)
        filtered: list[int] = []
        while True:
            with self._phase(producer.waits_for(check), seconds):
                states, equal = self._all_states(check)
                if equal:
                    filtered += equal
                    producer.take([index for index in equal if self._is_own(index)], check)
                    self._frontier = self._frontier.without(equal)
                    self._check_filtered(len(filtered))
                    self._open(step, check)
                    continue
                chosen = self._choose(states, step)
                if chosen is not None:
                    break
                producer.wait(WAIT_SECONDS)
                self._backend.report()
                check()
        with self._phase("rollout", seconds):
            own = producer.take([index for index in chosen if self._is_own(index)], check)
            batch = sorted((group for share in self._gather(own) for group in share), key=lambda group: group.index)
            pending = [group for share in self._gather(producer.pending(check)) for group in share]
        self._frontier = self._frontier.without(chosen)
        entry = JournalEntry(
            step,
            self._frontier.next_index,
            tuple(batch),
            tuple(filtered),
            tuple(sorted(pending, key=lambda group: group.index)),
            self._journal.rules,
        )
        assert entry.frontier == self._frontier
        self._write(entry)
        return entry

    def _open(self, step: int, check: Check) -> None:
        """Begin new prompt indices, as many as may be under way."""
        before = self._frontier
        bound = self._rollout.max_staleness
        self._frontier = before.filled(capacity_of(step - 1, self._rollout.prompts, bound, self._steps))
        self._begin((RolloutGroup(index) for index in range(before.next_index, self._frontier.next_index)), check)

    def _all_states(self, check: Check) -> tuple[list[GroupState], list[int]]:
        """Return the groups of all ranks, and the finished ones that the job filters out."""
        assert self._producer is not None
        groups = self._producer.states(check)
        equal: list[int] = []
        if self._rollout.filter == "equal" and not self._rewards.has_models:  # scores of a model are never equal
            done = self._producer.finished(check)
            equal = [group.index for group in done if not has_unequal_rewards(self._samples_of(group))]
        shares = self._gather((groups, equal))
        return [state for states, _ in shares for state in states], [index for _, share in shares for index in share]

    def _choose(self, states: Sequence[GroupState], step: int) -> tuple[int, ...] | None:
        staleness = self._rollout.max_staleness if self._backend.has_versions else None
        return choose_batch(states, step - 1, self._rollout.prompts, staleness)

    def _check_filtered(self, count: int) -> None:
        wanted = self._rollout.prompts
        if count >= MAX_DRAWS * wanted:
            raise EqualRewardsError(
                f"rollout.filter equal: {counted(count, 'prompt')} in a step had equal rewards, and a step needs "
                f"{wanted:,} others; use prompts that are neither too easy nor too hard, a larger rollout.group, or "
                "filter: none"
            )

    def _write(self, entry: JournalEntry) -> None:
        if self._ranks.rank != 0:
            return
        try:
            self._journal.write(entry)
        except OSError as error:
            reason = f"{self._journal.path(entry.step)}: {error.strerror or error}; after a fault its samples differ"
            self._note("journal_failed", reason)
            return
        oldest = max(self._oldest_checkpoint(), entry.step - MAX_ENTRIES)
        self._journal.remove(step for step in self._journal.steps() if step < oldest)

    # -- samples and numbers ------------------------------------------------------------------------------------------

    def _samples(self, entry: JournalEntry, seconds: dict[str, float], check: Check) -> StepSamples:
        samples = [sample for group in entry.batch for sample in self._samples_of(group)]
        with self._phase("reward", seconds):
            self._rewards.add_model_rewards(samples)
        warning = judge_failures(verdicts_of(samples))
        metrics = step_metrics(samples, self._rollout.group) | self._numbers(entry, check)
        return StepSamples(samples, self._rollout.group, entry.next_index, seconds, metrics, warning)

    def _samples_of(self, group: RolloutGroup) -> list[RolloutSample]:
        prompt = self._prompts.prompt(group.index)
        return [copy.sample(prompt, number) for number, copy in enumerate(group.copies)]

    def _numbers(self, entry: JournalEntry, check: Check) -> dict[str, float]:
        """Return the metrics of generation beside training, since the last step. A step of the journal has no
        throughput, and neither has one after everything was generated."""
        ages = [
            entry.step - 1 - version
            for group in entry.batch
            for copy in group.copies
            for version in copy.versions
            if version != ENVIRONMENT
        ]
        numbers = {"staleness": sum(ages) / max(1, len(ages)), "max_staleness": float(max(ages, default=0))}
        if self._backend.has_versions:
            numbers["staleness_bound"] = float(self._rollout.max_staleness)
        if self._producer is None:
            return numbers
        tokens, idle = self._producer.numbers(check)
        before, idle_before, since = self._looked
        now = time.monotonic()
        self._looked = (tokens, idle, now)
        elapsed = max(now - since, 1e-9)
        shares = self._gather(((tokens - before) / elapsed, (idle - idle_before) / elapsed))
        throughput = sum(own for own, _ in shares)
        if not throughput and not entry.frontier.pending:  # all is generated: the rollouts wait for nothing
            return numbers
        numbers["rollout_tokens_per_second"] = throughput
        numbers["rollout_idle_share"] = min(1.0, sum(idle for _, idle in shares) / len(shares))
        return numbers

    def _is_own(self, index: int) -> bool:
        return index % self._ranks.world == self._ranks.rank

    def _gather(self, item: Item) -> list[Item]:
        """Return what every rank has."""
        if self._ranks.world == 1:
            return [item]
        items: list[Any] = [None] * self._ranks.world
        dist.all_gather_object(items, item)
        return items

    def _beating(self, check: Check) -> Check:
        def check_and_beat() -> None:
            self._clock.page.beat()
            check()

        return check_and_beat

    @contextmanager
    def _phase(self, name: str, seconds: dict[str, float]) -> Iterator[None]:
        """Book the time inside as this phase."""
        began = time.perf_counter()
        if self._clock.current != name:
            self._clock.switch(name)
        yield
        seconds[name] += time.perf_counter() - began
