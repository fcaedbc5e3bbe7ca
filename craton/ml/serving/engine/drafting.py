"""Which requests get draft tokens in the next step, how many, and how many of them were accepted.

Draft tokens come from n-gram lookup on the host, or from a draft model on the device, which fills placeholders.
Requests get them in decode if their sampling needs only a temperature. With a draft model and `draft_auto`, their
number follows the measured acceptance and the step times of both models; it may be 0, with a trial now and then.
"""

from __future__ import annotations

from collections.abc import Collection

from craton.ml.serving.device import MAX_DRAFTED
from craton.ml.serving.schedule import DraftInput, ScheduledStep, Sequence, draft_lag, ngram_drafts, pack_drafts
from craton.ml.serving.settings import EngineSettings
from craton.planning.serving import AcceptanceEstimate, SpeculationCosts, best_draft_length, speculation_speedup

CHOSEN_STEPS = 16  # after which the number of draft tokens is chosen again
TRIAL_STEPS = 256  # without drafts, after which a draft is tried


class Drafting:
    """Draft tokens of one engine. `costs`: step times of the model and its draft model; None: n-gram drafts."""

    def __init__(self, settings: EngineSettings, max_length: int, costs: SpeculationCosts | None = None) -> None:
        self.length = 0  # draft tokens of a request in the next step
        self.drafts = self.drafted = self.accepted = 0
        self._settings, self._max_length, self._costs = settings, max_length, costs
        self._acceptance = AcceptanceEstimate()
        self._late: dict[Sequence, int] = {}  # tokens that the draft model catches up in the next step
        self._batch, self._context = 1, 1.0  # of the last choice
        self._since_choice = self._since_draft = 0

    @property
    def has_model(self) -> bool:
        return self._costs is not None

    @property
    def acceptance(self) -> float:
        """Return the estimated probability that a draft token is accepted; 0 without a draft model."""
        return self._acceptance.value if self.has_model else 0.0

    @property
    def speedup(self) -> float:
        """Return the estimated speed-up of decode by the draft model at present; 0 without one."""
        if self._costs is None:
            return 0.0
        return speculation_speedup(self.acceptance, self.length, self._costs, self._batch, self._context)

    def choose_length(self, running: Collection[Sequence]) -> None:
        """Choose the number of draft tokens of the next step: none with so many requests that verifying costs more."""
        number = len(running)
        lengths = [length for length in self._settings.draft_lengths if number * (length + 1) <= MAX_DRAFTED]
        if not lengths or not number:
            self.length = 0
        elif self._costs is None or not self._settings.draft_auto:
            self.length = lengths[0]
        elif number != self._batch or self.length not in lengths or self._since_choice >= CHOSEN_STEPS:
            self._since_choice, self._batch = 0, number
            self._context = max(1.0, sum(sequence.length for sequence in running) / number)
            self.length = best_draft_length(self.acceptance, self._costs, number, self._context, lengths)
            if not self.length and self._since_draft >= TRIAL_STEPS:
                self.length = lengths[0]
        self._since_choice += 1
        self._since_draft = 0 if self.length else self._since_draft + 1

    def set_drafts(self, running: Collection[Sequence]) -> None:
        """Set the draft tokens of all decoding requests, or placeholders for those of the draft model."""
        for sequence in running:
            sequence.drafts = []
        self._late = {}
        if not self.length:
            return
        takers = [sequence for sequence in running if self._takes_drafts(sequence)]
        if self.has_model:
            self._set_placeholders(takers)
        else:
            self._set_ngrams(takers)

    def pack(self, step: ScheduledStep) -> DraftInput | None:
        """Return the draft model's input for a scheduled step."""
        return pack_drafts(step, self._late) if self.has_model else None

    def verify(self, sequence: Sequence, tokens: list[int], made: int) -> int:
        """Return how many of a sequence's drafts equal the sampled tokens, and count them. The draft model made `made`
        tokens."""
        drafts = sequence.drafts
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == tokens[accepted]:
            accepted += 1
        self.drafts += 1
        self.drafted += len(drafts)
        self.accepted += accepted
        if self.has_model:
            self._acceptance.record(accepted, len(drafts))
            sequence.draft_computed = len(sequence.tokens) + min(accepted, made - 1)  # it did not compute its last one
        sequence.drafts = []
        return accepted

    def _takes_drafts(self, sequence: Sequence) -> bool:
        left = min(sequence.sampling.max_tokens - sequence.outputs, self._max_length - sequence.length) - 1
        if sequence.pending != 1 or sequence.grammar is not None or not sequence.is_plain or left < self.length:
            return False
        return not self.has_model or len(sequence.tokens) > sequence.prompt_length  # its first token does not wait

    def _set_placeholders(self, takers: list[Sequence]) -> None:
        budget = self._settings.chunk_tokens
        for sequence in takers:
            lag = draft_lag(sequence)
            if lag <= budget:
                sequence.drafts = [0] * self.length
            elif budget:
                self._late[sequence] = budget
            budget -= min(lag, budget)

    def _set_ngrams(self, takers: list[Sequence]) -> None:
        """If some requests have drafts, the others get filler tokens, so that a CUDA graph fits the step."""
        drafts = {sequence: ngram_drafts(sequence.tokens, self.length) for sequence in takers}
        if any(drafts.values()):
            for sequence, found in drafts.items():
                sequence.drafts = found + [sequence.tokens[-1]] * (self.length - len(found))
