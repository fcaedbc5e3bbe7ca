"""The model runner, the device side of an engine: weights, KV cache, and a row of state for every running request.

Steps run asynchronously: nothing here waits for the device. Sampled tokens stay in a table on the device for the next
step; `StepResult.read` copies them back. With tensor parallelism every rank does the same work on its shard of the
weights and samples the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from craton.ml.collectives import Peers, own_part
from craton.ml.kernels import add_norm, linear
from craton.ml.kernels.serving import FEW_ROWS, SharedPrefixes
from craton.ml.models import Decoder, rope_tables
from craton.ml.serving.device.attention_backends import AttentionBatch, PagedPast, make_backend
from craton.ml.serving.device.graphs import MAX_DRAFTED, DecodeGraphs
from craton.ml.serving.device.prompt_graphs import PromptGraphs, PromptInputs
from craton.ml.serving.device.row_table import RowTable
from craton.ml.serving.device.sampler import Chosen, PromptLogprobs, Tuning, logprobs_of, sample
from craton.ml.serving.device.shared_prefix import group_numbers, shared_prefixes
from craton.ml.serving.device.upload import Upload
from craton.ml.serving.messages import Alternatives
from craton.ml.serving.schedule import DUMMY, Integers, Move, PromptPart, StepInput, independent_moves
from craton.ml.serving.settings import EngineSettings

if TYPE_CHECKING:
    from craton.ml.serving.device.adapters import Adapters
    from craton.ml.serving.device.drafter import Drafter

PADDING = 16  # on a GPU the tokens of a step are a multiple of it, so that kernels are not compiled for each count
WARM_REQUESTS, WARM_TOKENS = (1, 33, 257), (2, 256)
PROMPT_ROWS = 256  # of logits computed at once for prompt log-probabilities


@dataclass
class StepResult:
    """The sampled tokens of a step; `read` waits for them."""

    tokens: Tensor
    logprobs: Tensor
    alternatives: tuple[Tensor, Tensor] | None
    prompts: PromptLogprobs
    done: torch.cuda.Event | None = None
    drafts: Tensor | None = None  # of the draft model [requests, length]

    def read(self) -> tuple[list[int], list[float]]:
        if self.done is not None:
            self.done.synchronize()
        return self.tokens.tolist(), self.logprobs.tolist()

    def read_drafts(self) -> list[list[int]]:
        return [] if self.drafts is None else self.drafts.tolist()

    def read_alternatives(self) -> list[tuple[list[int], list[float]]]:
        assert self.alternatives is not None
        tokens, logprobs = self.alternatives
        return list(zip(tokens.tolist(), logprobs.tolist(), strict=True))

    def read_prompts(self, parts: list[PromptPart]) -> list[list[Alternatives]]:
        """Return, for each chunk, the log-probabilities of its targets, each followed by the likeliest tokens."""
        result = []
        for part, (likeliest, best, own) in zip(parts, self.prompts, strict=True):
            rows = zip(part.targets, own.tolist(), likeliest.tolist(), best.tolist(), strict=True)
            result.append(
                [
                    Alternatives((token, *tokens[: part.alternatives]), (logprob, *logprobs[: part.alternatives]))
                    for token, logprob, tokens, logprobs in rows
                ]
            )
        return result


class Runner:
    """Executes steps in the order of submission. The runner of a draft model shares the requests of `main`."""

    def __init__(
        self,
        model: Decoder,
        settings: EngineSettings,
        max_length: int,
        blocks: int,
        host_blocks: int = 0,
        peers: Peers | None = None,
        adapters: Adapters | None = None,
        main: Runner | None = None,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.peers, self.adapters = peers, adapters
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        shape = model.config.shape
        self.vocabulary, self.page = shape.vocab, settings.page
        self.rows = settings.max_running + 1  # the last one is the dummy's
        columns = -(-max_length // settings.page) + 1
        cache_shape = block_shape(model, settings.page, 1 if peers is None else peers.size)
        precision = torch.float8_e4m3fn if settings.kv_precision == "fp8" else self.dtype
        cache = torch.zeros(blocks, *cache_shape, dtype=precision, device=self.device)
        if main is None:
            self.table = RowTable(self.rows, self.vocabulary, self.device)
            table = torch.full((self.rows, columns), DUMMY, dtype=torch.int32, device=self.device)
        else:
            self.table, table = main.table.shared(), main.past.table
        self.past: PagedPast = PagedPast(cache, table, make_backend(settings.backend))
        self.host_cache = None
        if host_blocks:
            self.host_cache = torch.empty(
                host_blocks, *cache_shape, dtype=precision, pin_memory=self.device.type == "cuda"
            )
        positions = torch.arange(columns * settings.page, device=self.device).unsqueeze(0)
        head_dim = shape.mla.qk_rope if shape.mla else shape.head_dim
        self.cosine, self.sine = (table[0] for table in rope_tables(positions, head_dim, model.config.rope))
        self.longest = columns * settings.page
        self.upload = Upload(self.device)
        self._padding = PADDING if self.device.type == "cuda" else (1 if peers is None else peers.size)
        self.graphs: DecodeGraphs | None = None
        self.prompt_graphs: PromptGraphs | None = None
        is_wanted = settings.graphs == "always" or (settings.graphs == "auto" and self.device.type == "cuda")
        if is_wanted and self.past.backend.can_be_captured and _has_captured_products(model):
            if main is None:
                shares_prefixes = settings.shared_prefix == "on"
                self.graphs = DecodeGraphs(self, settings.max_running, settings.draft_lengths, shares_prefixes)
                ranks = 1 if peers is None else peers.size
                self.prompt_graphs = PromptGraphs(self, settings.chunk_tokens, settings.max_running, ranks)
            else:  # two tokens, then one, of as many requests as get drafts
                self.graphs = DecodeGraphs(self, min(settings.max_running, MAX_DRAFTED // 2), (1,))
        self.drafter: Drafter | None = None
        self._is_compiled = False

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in the KV cache."""
        cache = self.past.cache
        return cache[0].numel() * cache.element_size() // self.page

    @torch.inference_mode()
    def execute(self, work: StepInput) -> StepResult:
        """Start a step; its result can be read later."""
        self.move(work.moves)
        self._update_table(work)
        self.table.start(work, self.upload)
        drafts = None
        if self.drafter is not None:
            self.drafter.move(work.moves)
            if work.drafts is not None:
                drafts = self.drafter.draft(work.drafts)
        chosen, prompts = self.compute(work, drafts)
        return self._result(chosen, prompts, drafts)

    def compute(self, work: StepInput, drafts: Tensor | None = None) -> tuple[Chosen, PromptLogprobs]:
        """Run a step over the tables as they are; return the sampled tokens, valid until the next step, and prompt
        log-probabilities."""
        placed = None
        if drafts is not None and drafts.numel():
            assert work.drafts is not None
            places, taken = self.upload.send(np.stack((work.drafts.places, work.drafts.chosen))).long()
            placed = places, drafts.flatten()[taken]
        graphs = next(
            (each for each in (self.graphs, self.prompt_graphs) if each is not None and each.takes(work)), None
        )
        if graphs is not None:
            logits, chosen, positions = graphs.replay(work, placed)
            rows = self.upload.send(work.sampled_rows) if work.is_tuned or self.table.written is not None else None
            prompts: PromptLogprobs = []
        else:
            hidden, positions = self._forward(work, placed)
            prompts = [self._prompt(hidden, part) for part in work.prompts]
            sampled = self.upload.send(work.sampled)
            rows = self.upload.send(work.sampled_rows).long()
            logits = self.logits(hidden[sampled]) if len(work.sampled) else hidden.new_empty(0, self.vocabulary)
            positions = positions[sampled] + 1
            chosen = None
        if len(work.sampled) and (chosen is None or work.is_tuned or work.alternatives):
            assert rows is not None or chosen is not None
            rows = self.upload.send(work.sampled_rows).long() if rows is None else rows.long()
            allowed = None if work.allowed is None else self.upload.send(work.allowed)
            tuning = self.table.tuning(work, rows, allowed) if work.is_tuned else None
            chosen = sample(
                logits,
                self.table.numbers["temperature"][rows],
                self.table.seeds[rows],
                positions,
                self.table.numbers["logprob_temperature"][rows],
                tuning,
                work.alternatives,
            )
            self.table.next_token[rows] = chosen.tokens.clamp(min=0)
        if chosen is None:
            empty = torch.empty(0, dtype=torch.int64, device=self.device)
            chosen = Chosen(empty, empty.float())
        elif rows is not None:
            self.table.count(rows.long(), chosen.tokens)
        return chosen, prompts

    def capture(self) -> None:
        """Capture the CUDA graphs and compile kernels; weights and KV cache must be allocated."""
        if self.device.type == "cuda" and not self._is_compiled:
            self._compile()
            self._is_compiled = True
        if self.graphs is not None:
            self.graphs.capture()
        if self.graphs is not None or self.device.type == "cuda":
            self._warm_up()
        if self.prompt_graphs is not None:  # last: the warm-up is of steps that are none
            self.prompt_graphs.capture()
        if self.drafter is not None:
            self.drafter.runner.capture()

    @torch.inference_mode()
    def _compile(self) -> None:
        """Compile the kernels of all steps in parallel. Their launches do nothing meanwhile: sampled tokens, which the
        next step would look up, are whatever the memory held."""
        from craton.ml.kernels.triton import compiling_ahead

        with compiling_ahead(may_fork=self.peers is None):
            self._run_every_body()

    def _run_every_body(self) -> None:
        for body in self._bodies():
            body()
            self.table.next_token.zero_()

    def _bodies(self) -> Iterator[Callable[[], object]]:
        """All kinds of steps; each must run before the next one is asked for."""
        if self.graphs is not None:
            yield from (body for _, body in self.graphs.bodies())
        if self.prompt_graphs is not None:
            yield from (body for _, _, body in self.prompt_graphs.bodies())
        yield from self._warm_ups()
        yield self._warm_up_sampling

    def sleep(self) -> None:
        """Free the KV cache and the graphs that refer to it."""
        if self.drafter is not None:
            self.drafter.runner.sleep()
        self.drop_graphs()
        self.past.cache.untyped_storage().resize_(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def drop_graphs(self) -> None:
        """Free the graphs; steps run without them."""
        for graphs in (self.graphs, self.prompt_graphs):
            if graphs is not None:
                graphs.drop()

    def wake(self) -> None:
        cache = self.past.cache
        cache.untyped_storage().resize_(cache.numel() * cache.element_size())
        cache.view(torch.uint8).zero_()
        if self.drafter is not None:
            self.drafter.runner.wake()

    def decode_body(
        self,
        rows: Tensor,
        lengths: Tensor,
        logits: Tensor,
        tokens: Tensor | None = None,
        shared: SharedPrefixes | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Decode one token of every request, from the device's token table and back to it: the body of a graph.

        rows, lengths int32 [requests]; logits are written to the tensor given → (tokens, their logprobs, positions).
        `tokens` [requests · queries], if given, are the last tokens of each request; each of them samples another.
        """
        queries = len(logits) // len(rows)
        places = rows.long()
        if tokens is None:
            tokens, positions = self.table.next_token[places], lengths.long() - 1
        else:
            steps = torch.arange(-queries, 0, device=self.device)
            places = places.repeat_interleave(queries)
            positions = (lengths.long()[:, None] + steps).flatten()
        slots = self._slots(places, positions)
        batch = AttentionBatch(rows, lengths, slots, len(rows), longest=self.longest, queries=queries, shared=shared)
        self.past.begin(batch)
        if self.adapters is not None:
            self.adapters.of_tokens = self.table.adapters[places]
        chosen = self._sample(self._hidden(tokens, positions), places, positions + 1, logits)
        if queries == 1:
            self.table.next_token[places] = chosen.tokens.clamp(min=0)
        return chosen.tokens, chosen.logprobs, positions + 1

    def prompt_body(self, inputs: PromptInputs, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run a step with prompts: the body of a graph. Logits are written to the tensor given → (tokens, their
        logprobs, positions) of what is sampled."""
        token_rows, positions, sampled = inputs.token_rows.long(), inputs.positions.long(), inputs.sampled.long()
        known = inputs.tokens.long()
        tokens = torch.where(known < 0, self.table.next_token[token_rows], known)
        batch = AttentionBatch(
            inputs.rows,
            inputs.lengths,
            self._slots(token_rows, positions),
            inputs.decode,
            inputs.offsets,
            longest=self.longest,
        )
        self.past.begin(batch)
        if self.adapters is not None:
            self.adapters.of_tokens = self.table.adapters[token_rows]
        hidden, places, positions = self._hidden(tokens, positions), inputs.sampled_rows.long(), positions[sampled] + 1
        chosen = self._sample(hidden[sampled], places, positions, logits)
        self.table.next_token[places] = chosen.tokens.clamp(min=0)
        return chosen.tokens, chosen.logprobs, positions

    def _sample(self, hidden: Tensor, rows: Tensor, positions: Tensor, logits: Tensor) -> Chosen:
        """Write the logits of these hidden states to the tensor given, and sample with each row's temperature."""
        if self.peers is None and len(hidden) > FEW_ROWS:
            torch.mm(hidden, own_part(self.model.head_weight).t(), out=logits)
        else:
            logits.copy_(self.logits(hidden))
        numbers = self.table.numbers
        return sample(
            logits,
            numbers["temperature"][rows],
            self.table.seeds[rows],
            positions,
            numbers["logprob_temperature"][rows],
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] → [rows, vocabulary], on every rank."""
        part = linear(hidden, own_part(self.model.head_weight))
        if self.peers is None:
            return part
        whole = self.peers.gather(part).view(self.peers.size, len(hidden), -1)
        return whole.transpose(0, 1).flatten(1)

    def _forward(self, work: StepInput, placed: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Run all tokens of a step through the model: hidden [tokens, hidden], positions [tokens].

        `placed`: indices of the sent tokens that are on the device only, and these tokens."""
        counts, lengths, rows = work.counts, work.lengths, work.rows
        tokens = int(counts.sum())
        others = np.zeros(len(counts) - work.decode + 1, np.int32)
        np.cumsum(counts[work.decode :], out=others[1:])
        others += work.decode
        sent = work.tokens
        if extra := -tokens % self._padding:  # a padding request makes it a multiple
            counts, lengths, rows = np.append(counts, extra), np.append(lengths, extra), np.append(rows, self.rows - 1)
            others = np.append(others, others[-1] + extra)
            sent = np.append(sent, np.zeros(extra, np.int32))
        counts, lengths, rows = (element.astype(np.int32) for element in (counts, lengths, rows))
        ends = np.cumsum(counts)
        position = np.arange(tokens + extra) - np.repeat(ends - lengths, counts)
        groups = np.zeros(0, np.int32) if work.groups is None else group_numbers(work.groups, work.decode)
        fields = (rows, lengths, others, sent, np.repeat(rows, counts), position, groups)
        packed = self.upload.send(np.concatenate([entry.astype(np.int32) for entry in fields]))
        device_rows, device_lengths, offsets, known_tokens, token_rows, positions, groups_sent = packed.split(
            [len(item) for item in fields]
        )
        token_rows, positions = token_rows.long(), positions.long()
        written = self.table.next_token[token_rows[: work.decode]]
        known_tokens = known_tokens.long()
        if placed is not None:
            known_tokens[placed[0]] = placed[1]
        inputs = torch.cat([written, known_tokens])
        batch = AttentionBatch(
            device_rows,
            device_lengths,
            self._slots(token_rows, positions),
            work.decode,
            offsets,
            longest=self.longest,
            shared=None if work.groups is None else shared_prefixes(groups_sent, work.decode),
        )
        self.past.begin(batch)
        if self.adapters is not None:
            self.adapters.of_tokens = self.table.adapters[token_rows]
        return self._hidden(inputs, positions), positions

    def _hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens, positions [tokens] → the hidden state after the last norm [tokens, hidden]."""
        model = self.model
        rope = (self.cosine[positions].unsqueeze(0), self.sine[positions].unsqueeze(0))
        residual, delta = model.embedding(tokens.unsqueeze(0)), None
        for block in model.blocks:
            residual, delta = block(residual, delta, rope, self.past)
        hidden = add_norm(residual, delta, own_part(model.norm.weight), model.config.norm_epsilon)[1]
        return hidden.flatten(0, 1) if self.peers is None else self.peers.gather(hidden)

    def _warm_up(self) -> None:
        """Compile kernels now, not during the first requests."""
        for execute in (*self._warm_ups(), self._warm_up_sampling):
            execute()

    def _warm_ups(self) -> Iterator[Callable[[], object]]:
        """Steps without a graph. Padding requests suffice: few and many, short and long ones, which use different
        kernels."""
        largest = self.rows - 1
        for requests in sorted({min(item, largest) for item in WARM_REQUESTS}):
            for tokens in WARM_TOKENS:
                counts = np.full(requests, 2, np.int32)
                counts[0] = min(tokens, self.longest)
                dummies = np.full(requests, self.rows - 1, np.int32)
                dummy_tokens, last = np.zeros(counts.sum(), np.int32), np.cumsum(counts, dtype=np.int32) - 1
                yield partial(self.execute, StepInput(dummies, counts, counts, 0, dummy_tokens, last, dummies))

    def _warm_up_sampling(self) -> None:
        """Compile what samples from the model's logits and, after penalties, logit bias or a grammar, from fp32."""
        zero, one = (torch.full((1,), value, dtype=torch.int64, device=self.device) for value in (0, 1))
        logits = torch.zeros(1, self.vocabulary, dtype=self.dtype, device=self.device)
        nothing_added = (zero, zero, zero.float())
        for tuning in (Tuning(top_k=one), Tuning(top_k=one, added=nothing_added), Tuning(added=nothing_added)):
            sample(logits, one.float(), zero, zero, zero.float(), tuning)

    def _slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        blocks = self.past.table[rows, positions // self.page].long()
        return blocks * self.page + positions % self.page

    def _prompt(self, hidden: Tensor, part: PromptPart) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities of the targets and the likeliest tokens, a few rows of logits at a time."""
        targets = torch.tensor(part.targets, device=self.device)
        likeliest, best, own = [], [], []
        for begin in range(0, len(targets), PROMPT_ROWS):
            chunk = targets[begin : begin + PROMPT_ROWS]
            first = part.begin + begin
            logits = self.logits(hidden[first : first + len(chunk)])
            values, tokens = logits.float().log_softmax(-1).topk(max(1, part.alternatives))
            likeliest.append(tokens)
            best.append(values)
            own.append(logprobs_of(logits, chunk))
        return torch.cat(likeliest), torch.cat(best), torch.cat(own)

    def set_next_tokens(self, rows: Integers, tokens: Tensor) -> None:
        """Set the tokens that these requests decode next."""
        self.table.next_token[self.upload.send(rows).long()] = tokens

    def move(self, moves: Sequence[Move]) -> None:
        """Copy blocks of the KV cache, in order; successive copies on the device run at once."""
        cache, host = self.past.cache, self.host_cache
        for moves_at_once in independent_moves(moves):
            move = moves_at_once[0]
            if move.kind == "copy":
                self._copy_blocks(moves_at_once)
            elif move.kind == "out":
                assert host is not None
                host[move.target].copy_(cache[move.source], non_blocking=True)
            else:
                assert host is not None
                cache[move.target].copy_(host[move.source], non_blocking=True)

    def _copy_blocks(self, moves: Sequence[Move]) -> None:
        """Copy blocks on the device in one kernel for dozens of them, without a temporary one."""
        cache = self.past.cache
        if cache.element_size() == 1:
            cache = cache.view(torch.uint8)  # fp8 has no such kernel
        torch._foreach_copy_([cache[move.target] for move in moves], [cache[move.source] for move in moves])

    def _update_table(self, work: StepInput) -> None:
        if work.table:
            changes = self.upload.send(np.asarray(work.table, np.int32)).long()
            self.past.table[changes[:, 0], changes[:, 1]] = changes[:, 2].int()

    def _result(self, chosen: Chosen, prompts: PromptLogprobs, drafts: Tensor | None) -> StepResult:
        def back(tensor: Tensor) -> Tensor:
            if self.device.type != "cuda":
                return tensor.clone()
            return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)

        alternatives = None
        if chosen.alternatives is not None:
            alternatives = (back(chosen.alternatives[0]), back(chosen.alternatives[1]))
        prompt_logprobs = [(back(first), back(second), back(third)) for first, second, third in prompts]
        result = StepResult(back(chosen.tokens), back(chosen.logprobs), alternatives, prompt_logprobs)
        result.drafts = None if drafts is None else back(drafts)
        if self.device.type == "cuda":
            result.done = torch.cuda.Event()
            result.done.record()
        return result


def _has_captured_products(model: Decoder) -> bool:
    """Whether a CUDA graph can capture the matmuls of all layers: grouped matmuls of experts read host memory, unless
    they are in bf16 or fp8 (torch 2.11)."""
    parameter = next(model.parameters())
    return not (model.config.shape.experts and parameter.is_cuda and parameter.dtype is not torch.bfloat16)


def block_shape(model: Decoder, page: int, ranks: int = 1) -> tuple[int, ...]:
    """Return the shape of one KV cache block: [layers, parts, kv heads, page, head_dim]."""
    shape = model.config.shape
    if shape.mla:  # the latents and the rotated key that all heads share: whole on every rank, and keys only
        return shape.layers, 1, 1, page, shape.mla.kv_lora + shape.mla.qk_rope
    return shape.layers, 2, shape.kv_heads // ranks, page, shape.head_dim
