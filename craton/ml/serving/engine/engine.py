"""The engine: requests in, tokens out, one step at a time.

`step` starts the next step before it reads back the previous one, which hides the host's time. Only grammars and draft
tokens, which need the last token on the host, make it read first. An error of one request ends that request; the others
continue.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from craton.errors import CratonError
from craton.ml.serving.engine.drafting import Drafting
from craton.ml.serving.engine.execution import Executor, InFlightStep
from craton.ml.serving.engine.measurements import Rates
from craton.ml.serving.engine.request_limits import RequestLimits
from craton.ml.serving.messages import (
    SEEDS,
    Abort,
    Alternatives,
    Finish,
    Fork,
    OutputDelta,
    Sampling,
    Stats,
    Submit,
    seed_of_copy,
)
from craton.ml.serving.schedule import (
    BlockPool,
    DraftInput,
    Integers,
    PrefixTree,
    ScheduledChunk,
    ScheduledStep,
    Scheduler,
    Sequence,
    is_plain,
    pack,
)
from craton.ml.serving.settings import EngineSettings, NotNowError, ServingError

if TYPE_CHECKING:
    from craton.ml.serving.grammar import Grammars, GrammarState

State = Literal["running", "paused", "asleep"]


class Engine:
    """Serves one model. Not thread-safe."""

    def __init__(
        self,
        executor: Executor,
        settings: EngineSettings,
        vocabulary: int,
        max_length: int,
        blocks: int,
        host_blocks: int = 0,
        stop_tokens: Iterable[int] = (),
        grammars: Grammars | None = None,
        adapters: Mapping[str, int] | None = None,
        rates: Rates | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        self.settings = settings
        self.vocabulary, self.max_length = vocabulary, max_length
        self.version = 0
        self.state: State = "running"
        self.refusal = ""  # why requests are refused
        self.adapters: dict[str, int] = dict(adapters or {})
        self._executor = executor
        self._grammars = grammars
        self._limits = RequestLimits(max_length, vocabulary, frozenset(stop_tokens))
        self._pool = BlockPool(blocks)
        self._host_pool = BlockPool(host_blocks) if host_blocks > 1 else None
        self._tree = PrefixTree(self._pool, settings.page, self._host_pool)
        sharing = settings.sharing_costs if settings.shared_prefix == "on" else None
        self.scheduler = Scheduler(self._pool, self._tree, settings.max_running, settings.chunk_tokens, sharing)
        self._sequences: dict[int, list[Sequence]] = {}
        self._compiling: list[tuple[Future[GrammarState], Sequence]] = []
        self._in_flight: deque[InFlightStep] = deque()
        self._ended: list[OutputDelta] = []
        self._rates = rates or Rates()
        self._seeds = random.Random()
        self._drafting = drafting or Drafting(settings, max_length)
        self._num_ended = self._num_aborted = self._num_failed = 0

    # -- requests -------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return not self._sequences and not self._in_flight and not self._ended

    @property
    def is_still(self) -> bool:
        """Whether the next step has nothing to compute: any open request waits for its grammar to compile."""
        has_started = self._in_flight or self.scheduler.running or self.scheduler.waiting
        return not self._ended and not has_started

    @property
    def has_grammars(self) -> bool:
        return self._grammars is not None

    def submit(self, request: Submit) -> None:
        """Accept a request. An invalid one ends alone, with an error as its last delta."""
        try:
            self._check(request)
        except ServingError as error:
            is_ours = isinstance(error, NotNowError)
            for index in range(request.copies):
                self._ended.append(OutputDelta(request.id, index, finish="error", error=str(error), is_ours=is_ours))
            return
        sampling = request.sampling
        limit = min(sampling.max_tokens, self.max_length - len(request.prompt))
        sequence = self._sequence(request, replace(sampling, max_tokens=limit))
        self._sequences[request.id] = [sequence]
        if sampling.grammar is None:
            self._enqueue(sequence)
        else:
            assert self._grammars is not None
            self._compiling.append((self._grammars.start(sampling.grammar), sequence))

    def abort(self, request: Abort) -> None:
        """End a request, or one copy of it, unless it has ended."""
        for sequence in list(self._sequences.get(request.id, ())):
            if request.index is None or (sequence.index == request.index and sequence.copies == 1):
                self._ended += self._give_up(sequence, "abort")
            elif sequence.index <= request.index < sequence.index + sequence.copies:  # a copy that does not exist yet
                if request.index not in sequence.skipped:
                    sequence.skipped.add(request.index)
                    self._ended.append(OutputDelta(sequence.id, request.index, finish="abort"))
                if len(sequence.skipped) == sequence.copies:
                    self._end(sequence, "abort")

    def start_branches(self, request: Fork) -> None:
        """Start the branches of a fork. One that cannot start ends alone, with an error as its last delta."""
        for branch in request.branches:
            try:
                self.fork(request.id, request.index, branch.id, branch.sampling)
            except ServingError as error:
                self._ended.append(OutputDelta(branch.id, finish="error", error=str(error)))

    def fork(self, id: int, index: int, new_id: int, sampling: Sampling | None = None) -> None:  # noqa: A002
        """Start a new request that continues from the present tokens of another one, with its own sampling."""
        parent = next((sequence for sequence in self._sequences.get(id, ()) if sequence.index == index), None)
        if parent is None or parent.copies > 1:
            raise ServingError(f"request {id}, copy {index}, is not running; only running requests can be forked")
        if new_id in self._sequences:
            raise ServingError(f"request {new_id} is already running")
        chosen = sampling or parent.sampling
        if chosen.grammar != parent.sampling.grammar or (chosen.grammar is not None and parent.grammar is None):
            raise ServingError("a fork must use its parent's grammar, and the parent's must be compiled first")
        self._limits.check_sampling(chosen)
        limit = min(chosen.max_tokens, self.max_length - parent.prompt_length)
        if limit <= len(parent.tokens) - parent.prompt_length:
            raise ServingError(f"request {id} has already generated {limit} tokens; give the fork a larger max_tokens")
        child = parent.forked(
            id=new_id,
            index=0,
            sampling=replace(chosen, max_tokens=limit, prompt_logprobs=None),
            seed=self._seed(chosen, 0),
            stops=self._limits.stops(chosen),
            is_plain=is_plain(chosen),
            carried=len(parent.tokens) - parent.prompt_length,
            is_fork=True,
            prompt_logprobs=None,
            is_new=True,
            admitted=0.0,
        )
        self._sequences[new_id] = [child]
        self.scheduler.fork(parent, child)

    def step(self) -> list[OutputDelta]:
        """Start the next step and return the output of the previous one."""
        pieces = self.take_ended()
        if self.settings.draft_tokens:
            self._drafting.choose_length(self.scheduler.running)
        if self._must_read_first():
            pieces += self._read_all()
        if self.state != "running":
            return pieces + self._read_all()
        if self.settings.draft_tokens:
            self._drafting.set_drafts(self.scheduler.running)
        step = self.scheduler.schedule()
        if step is None:
            return pieces + self._read_all()
        self._start(step)
        if len(self._in_flight) > int(self.settings.overlap):
            pieces += self._read(self._in_flight.popleft())
        return pieces

    def take_ended(self) -> list[OutputDelta]:
        """Return the last deltas of requests that ended outside a step: refused, aborted, or with a bad grammar."""
        self._collect_grammars()
        pieces, self._ended = self._ended, []
        return pieces

    # -- administration ---------------------------------------------------------------------------------------------

    def pause(self, mode: Literal["abort", "wait", "keep"] = "keep") -> list[OutputDelta]:
        """Run no steps until `resume`. Running requests are aborted, finish first, or keep their state."""
        self._expect("running")
        pieces: list[OutputDelta] = []
        if mode == "abort":
            for id in list(self._sequences):  # noqa: A001
                self.abort(Abort(id))
        elif mode == "wait":
            self.stop_admitting()
            while not self.is_drained:
                pieces += self.step()
        self.scheduler.is_admitting = True
        pieces += self._read_all()
        self.state = "paused"
        return pieces + self.take_ended()

    def stop_admitting(self) -> None:
        """Admit no new requests while running ones continue, until `pause` is called."""
        self._expect("running")
        self.scheduler.is_admitting = False

    @property
    def is_drained(self) -> bool:
        """Whether all admitted requests have ended."""
        return not self.scheduler.running and not self._in_flight

    def resume(self) -> None:
        self._expect("paused")
        self.state = "running"

    def release(self) -> list[OutputDelta]:
        """Free the whole KV cache: running requests are preempted and recomputed later."""
        pieces = self._read_all()
        self.scheduler.preempt_all()
        self.forget()
        return pieces

    def forget(self) -> None:
        """Empty the prefix cache; blocks in use are freed when their requests end."""
        self.scheduler.forget(lambda root: True)

    def reset(self) -> None:
        """Forget all earlier requests: the steps of the next ones depend on nothing before them. It must be idle."""
        assert self.is_idle
        self.scheduler.reset()

    def change_version(self, version: int | None = None, recompute: bool = False) -> list[OutputDelta]:
        """Switch to another version of the weights. `recompute`: also recompute the KV cache of running requests."""
        pieces = self._read_all()
        if recompute:
            self.scheduler.preempt_all()
        self.refusal = ""
        self.version = self.version + 1 if version is None else version
        self.scheduler.change_version(self.version)
        return pieces

    def refuse(self, reason: str) -> list[OutputDelta]:
        """End all requests with this reason and refuse new ones until the next `change_version`."""
        pieces = self._read_all()
        for sequence in [copy for copies in self._sequences.values() for copy in copies]:
            pieces += self._give_up(sequence, "error", reason, is_ours=True)
        self.refusal = reason
        return pieces

    def finish_in_flight(self) -> list[OutputDelta]:
        """Read back all started steps."""
        return self._read_all()

    def drop_adapter(self, name: str) -> list[OutputDelta]:
        """Remove an adapter and end its requests."""
        pieces = self._read_all()
        for sequence in [copy for copies in self._sequences.values() for copy in copies if copy.adapter == name]:
            pieces += self._give_up(sequence, "error", f"adapter {name!r} was unloaded", is_ours=True)
        del self.adapters[name]
        self.forget_adapter(name)
        return pieces

    def forget_adapter(self, name: str) -> None:
        """Remove an adapter's blocks from the prefix cache."""
        self.scheduler.forget(lambda root: root[1] == name)

    def check(self) -> None:
        """Assert that no block is lost or has a holder too many."""
        self.scheduler.check()
        if self._host_pool is not None:
            self._host_pool.check([self._tree.held_on_host()])

    def stats(self) -> Stats:
        counters = self.scheduler.counters
        host = self._host_pool
        return Stats(
            running=len(self.scheduler.running),
            waiting=self.scheduler.waiting + len(self._compiling),
            blocks_used=self._pool.count - self._pool.free - self._tree.evictable,
            blocks=self._pool.count,
            host_blocks_used=0 if host is None else host.count - host.free,
            host_blocks=0 if host is None else host.count,
            preemptions=counters.preemptions,
            prefix_queries=counters.queried_tokens,
            prefix_hits=counters.device_tokens,
            host_hits=counters.host_tokens,
            drafts=self._drafting.drafts,
            drafted=self._drafting.drafted,
            accepted=self._drafting.accepted,
            draft_tokens=self._drafting.length,
            draft_acceptance=self._drafting.acceptance,
            draft_speedup=self._drafting.speedup,
            ended=self._num_ended,
            aborted=self._num_aborted,
            failed=self._num_failed,
            steps=self._rates.steps,
            step_tokens=self._rates.step_tokens,
            context_tokens=self._rates.context_tokens,
            shared_tokens=self._rates.shared_tokens,
            steps_by_tokens=tuple(self._rates.steps_by_tokens),
            step_seconds=self._rates.step_seconds,
            plan_step_seconds=self._rates.plan_step_seconds,
            roofline=self._rates.roofline,
            tokens_per_second=self._rates.tokens_per_second,
            weights_version=self.version,
            state=self.state,
            refusal=self.refusal,
        )

    # -- a step -------------------------------------------------------------------------------------------------------

    def _start(self, step: ScheduledStep) -> None:
        for part in step.parts:
            if part.samples and part.sequence.copies > 1:
                self._copy(part.sequence, step)
        allowed, lost = self._allowed(step)
        work = pack(step, allowed)
        work.drafts = self._drafting.pack(step)
        self._in_flight.append(InFlightStep(step, work, self._executor.execute(work), self.version))
        for sequence, error in lost:
            self._ended.append(OutputDelta(sequence.id, sequence.index, finish="error", error=error))
            self._end(sequence, "error")

    def _must_read_first(self) -> bool:
        """Whether the next step needs tokens on the host, or which drafts of the last one were accepted."""
        has_drafts = self._drafting.length > 0 or any(
            part.drafts for last in self._in_flight for part in last.step.parts
        )
        return has_drafts or any(sequence.grammar is not None for sequence in self.scheduler.running)

    def _read_all(self) -> list[OutputDelta]:
        pieces: list[OutputDelta] = []
        while self._in_flight:
            pieces += self._read(self._in_flight.popleft())
        return pieces

    def _read(self, in_flight: InFlightStep) -> list[OutputDelta]:
        tokens, logprobs = in_flight.result.read()
        drafts = iter(in_flight.result.read_drafts() if in_flight.work.drafts is not None else ())
        likeliest = in_flight.result.read_alternatives() if in_flight.work.alternatives else None
        self._take_prompts(in_flight)
        pieces = []
        begin = 0
        for part in in_flight.step.parts:
            sequence = part.sequence
            if not part.samples:
                self.scheduler.commit(sequence)
                continue
            end = begin + 1 + part.drafts
            if part.drafts and in_flight.work.drafts is not None:
                sequence.drafts = next(drafts)[: part.drafts]
            if sequence.finish is None:
                piece = OutputDelta(sequence.id, sequence.index)
                self._take(sequence, part, tokens[begin:end], piece, in_flight.work.drafts)
                count = len(piece.tokens)
                piece.logprobs = logprobs[begin : begin + count]
                piece.versions = [in_flight.version] * count
                if piece.stop_token is not None:
                    piece.stop_logprob, piece.stop_version = logprobs[begin + count], in_flight.version
                if likeliest is not None and sequence.sampling.logprobs is not None:
                    wanted = sequence.sampling.logprobs
                    piece.alternatives = [
                        Alternatives((token, *others[:wanted]), (logprob, *values[:wanted]))
                        for token, logprob, (others, values) in zip(
                            piece.tokens, piece.logprobs, likeliest[begin : begin + count], strict=True
                        )
                    ]
                pieces.append(piece)
            begin = end
        self._rates.record(
            in_flight.step, len(tokens), sum(len(piece.tokens) for piece in pieces), in_flight.work.drafts
        )
        return pieces

    def _take(
        self, sequence: Sequence, part: ScheduledChunk, tokens: list[int], piece: OutputDelta, made: DraftInput | None
    ) -> None:
        """Append sampled tokens to a sequence, up to its first rejected draft token or its end."""
        if part.drafts:
            tokens = tokens[: self._drafting.verify(sequence, tokens, 0 if made is None else made.length) + 1]
        else:
            sequence.in_flight -= 1
        if sequence.is_new:
            piece.cached_tokens = min(sequence.cached_tokens, sequence.prompt_length)
            piece.prompt_logprobs = sequence.prompt_logprobs
            piece.admitted = sequence.admitted
            if sequence.is_fork:
                begin = sequence.prompt_length
                piece.generated = sequence.tokens[begin : begin + sequence.carried]
            sequence.is_new = False
        for token in tokens:
            if token < 0:
                piece.error = (
                    "the model's output for this request is not a number (NaN or infinite); its weights may be damaged"
                )
                piece.finish, piece.is_ours = "error", True
                # Drop its root from the prefix cache: any of its blocks may be bad.
                self.scheduler.forget(lambda root: root == (sequence.version, sequence.adapter))
            elif token in sequence.stops:
                piece.finish, piece.stop_token = "stop", token
            else:
                sequence.tokens.append(token)
                piece.tokens.append(token)
                try:
                    piece.finish = self._finish_of(sequence, token)
                except CratonError as error:  # its grammar exceeded a limit
                    piece.finish, piece.error = "error", str(error)
            if piece.finish is not None:
                break
        if part.drafts:
            sequence.computed = len(sequence.tokens) - 1
        self.scheduler.commit(sequence)
        if piece.finish is not None:
            self._end(sequence, piece.finish)

    def _finish_of(self, sequence: Sequence, token: int) -> Finish | None:
        if sequence.grammar is not None:
            sequence.grammar.accept(token)
            if sequence.grammar.is_finished:
                return "stop"
        is_full = len(sequence.tokens) - sequence.prompt_length >= sequence.sampling.max_tokens
        return "length" if is_full else None

    def _give_up(self, sequence: Sequence, finish: Finish, error: str = "", is_ours: bool = False) -> list[OutputDelta]:
        """End a sequence and its copies that do not exist yet; return their last deltas."""
        copies = set(range(sequence.index, sequence.index + sequence.copies)) - sequence.skipped
        self._end(sequence, finish)
        return [
            OutputDelta(sequence.id, index, finish=finish, error=error, is_ours=is_ours) for index in sorted(copies)
        ]

    def _end(self, sequence: Sequence, finish: Finish) -> None:
        sequence.finish = finish
        self._num_ended += 1
        # A request that ends at a stop string is aborted, too, when its text is complete.
        self._num_aborted += finish == "abort" and len(sequence.tokens) <= sequence.prompt_length + sequence.carried
        self._num_failed += finish == "error"
        self.scheduler.finish(sequence)
        copies = self._sequences[sequence.id]
        copies.remove(sequence)
        if not copies:
            del self._sequences[sequence.id]

    def _take_prompts(self, in_flight: InFlightStep) -> None:
        if not in_flight.work.prompts:
            return
        prompts = in_flight.result.read_prompts(in_flight.work.prompts)
        for asked, values in zip(in_flight.work.prompts, prompts, strict=True):
            part = in_flight.step.parts[asked.part]
            sequence = part.sequence
            sequence.prompt_found |= {part.begin + 1 + offset: value for offset, value in enumerate(values)}
            if len(sequence.prompt_found) == sequence.prompt_length - 1:
                places = range(1, sequence.prompt_length)
                sequence.prompt_logprobs = [None, *(sequence.prompt_found[place] for place in places)]

    # -- what sequences need ------------------------------------------------------------------------------------------

    def _check(self, request: Submit) -> None:
        if request.id in self._sequences:
            raise ServingError(f"request {request.id} is already running")
        self._limits.check(request)
        if request.adapter is not None and request.adapter not in self.adapters:
            loaded = ", ".join(self.adapters) or "none"
            raise ServingError(f"adapter {request.adapter!r} is not loaded; loaded: {loaded}")
        if request.sampling.grammar is not None and self._grammars is None:
            raise ServingError("structured output needs a tokenizer, and this engine has none")
        if self.refusal:
            raise NotNowError(self.refusal)
        if self.state == "asleep":
            raise NotNowError("the engine is asleep; wake it first")

    def _sequence(self, request: Submit, sampling: Sampling, index: int = 0) -> Sequence:
        return Sequence(
            request.id,
            index,
            [*request.prompt, *request.generated],
            sampling,
            self._seed(sampling, index),
            len(request.prompt),
            self._limits.stops(sampling),
            is_plain(sampling),
            priority=request.priority,
            adapter=request.adapter,
            copies=request.copies,
            adapter_slot=-1 if request.adapter is None else self.adapters[request.adapter],
            carried=len(request.generated),
            prompt_logprobs=[None] if len(request.prompt) == 1 else None,
        )

    def _enqueue(self, sequence: Sequence) -> None:
        """Queue a sequence, or end it if the tokens that it carries complete its answer."""
        if sequence.grammar is not None and sequence.carried:
            sequence.grammar.accept_all(sequence.tokens[sequence.prompt_length :])
            if sequence.grammar.is_finished:
                self._ended += self._give_up(sequence, "stop")
                return
        if sequence.is_at_limit:
            self._ended += self._give_up(sequence, "length")
        else:
            self.scheduler.add(sequence)

    def _seed(self, sampling: Sampling, index: int) -> int:
        return self._seeds.randrange(SEEDS) if sampling.seed is None else seed_of_copy(sampling.seed, index)

    def _copy(self, first: Sequence, step: ScheduledStep) -> None:
        """Fork the other copies of a request off its prompt's blocks."""
        indexes = [index for index in range(first.copies) if index not in first.skipped]
        if indexes[0] != first.index:
            first.index, first.seed = indexes[0], self._seed(first.sampling, indexes[0])
            if first not in step.started:  # the device has the seed of its former index
                step.started.append(first)
        for index in indexes[1:]:
            child = first.forked(
                index=index,
                seed=self._seed(first.sampling, index),
                copies=1,
                sampling=replace(first.sampling, prompt_logprobs=None),
            )
            self._sequences[first.id].append(child)
            self.scheduler.fork(first, child)
            child.cached_tokens = first.cached_tokens  # the first copy's own prefill was not a cache hit
        first.copies = 1

    def _collect_grammars(self) -> None:
        for compiled, sequence in list(self._compiling):
            if sequence.finish is not None:
                self._compiling.remove((compiled, sequence))
                assert self._grammars is not None
                self._grammars.cancel(compiled)
            elif compiled.done():
                self._compiling.remove((compiled, sequence))
                if (error := compiled.exception()) is not None:
                    self._ended += self._give_up(sequence, "error", str(error))
                    continue
                sequence.grammar = compiled.result()
                try:
                    self._enqueue(sequence)
                except CratonError as refusal:  # of the tokens to continue from
                    self._ended += self._give_up(sequence, "error", str(refusal))

    def _allowed(self, step: ScheduledStep) -> tuple[Integers | None, list[tuple[Sequence, str]]]:
        """Return the token bitmask of each sampled place (None: no grammar), and the sequences whose grammar exceeded a
        limit, with the reason."""
        sampled = [part.sequence for part in step.parts if part.samples for _ in range(1 + part.drafts)]
        states = {row: sequence.grammar for row, sequence in enumerate(sampled) if sequence.grammar is not None}
        if not states:
            return None, []
        assert self._grammars is not None
        allowed = np.full((len(sampled), -(-self.vocabulary // 32)), -1, np.int32)
        failed = self._grammars.fill(states, allowed)
        return allowed, [(sampled[row], error) for row, error in failed.items()]

    def _expect(self, state: State) -> None:
        if self.state != state:
            raise ServingError(f"the engine is {self.state}; this requires state {state}")
