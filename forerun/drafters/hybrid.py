"""Suffix drafts if they are likely to be accepted, else another method's drafts."""

from __future__ import annotations

from collections import abc
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from forerun.drafters.suffix import SuffixDrafter
from forerun.engine.draft import Draft
from forerun.engine.step import Drafter, Proposal
from forerun.engine.target import is_alone, next_size
from forerun.methods import Hybrid, Method, Parts
from forerun.planning.cost_model import Forwards
from forerun.planning.forecast import Forecast, PlannedDrafter, StepSituation, forecast
from forerun.planning.guard import GuardedDrafter, GuardMemo
from forerun.planning.source_chooser import Choice, SourceChooser, SourceOutcome

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.engine.sequence import Sequence
    from forerun.engine.step import RowOutcome
    from forerun.engine.target import ChunkSize
    from forerun.model.causal_lm import CausalLM

THRESHOLD_WITHOUT_COSTS = 6.0
MAX_READ = 2048  # the most tokens of prompts that a step waits for


@dataclass(frozen=True)
class SuffixNote:
    """What is known of a row before a step.

    Attributes:
        suffix: its suffix draft.
        score: the draft's expected number of accepted tokens.
        length: the tokens of its text.
        situation: the step as the chooser sees it for this row.
        choice: who is to draft.
    """

    suffix: Draft
    score: float
    length: int
    situation: StepSituation
    choice: Choice


@dataclass(frozen=True)
class HybridMemo:
    """What a hybrid drafter keeps of a step until it observes it.

    Attributes:
        notes: {sequence: what was known of it before the step}.
        asked: the sequences for which the other drafter was called.
        forwards: the number of the other drafter's forwards.
        inner: the other drafter's own memo, None if it was not called.
    """

    notes: dict[int, SuffixNote]
    asked: frozenset[int]
    forwards: int
    inner: Any


class HybridPlanner:
    """The planner of two drafters of which either may draft a row."""

    def __init__(self, suffixes: Drafter, other: Drafter) -> None:
        self._drafters = suffixes, other

    def forecast(self, situation: StepSituation) -> Forecast:
        """Return the forecast of the first drafter whose drafts pay, or that of the last one."""
        suffixes, other = self._drafters
        of_suffixes = forecast(suffixes, situation)
        return of_suffixes if of_suffixes.pays else forecast(other, situation)


class HybridDrafter(PlannedDrafter):
    """Draft by suffixes, or call the other drafter where the chooser prefers it.

    Without a chooser the other drafter is called for rows whose suffix draft scores below
    `threshold`. If it has no draft, the suffix draft is used, unless the chooser prefers none.

    The other drafter reads a prompt when it is first called: `MAX_READ` tokens per step for the
    only request, else a chunk. One that wants hidden states gets them at once, and reads by itself.

    The other drafter may have a guard for itself alone, which judges it by the steps in which it
    drafted for all rows. In a pause of that guard suffixes draft for all rows. Plain steps that the
    guard measures stay plain.
    """

    def __init__(
        self,
        suffixes: SuffixDrafter,
        other: Drafter,
        threshold: float,
        chooser: SourceChooser | None = None,
        draft: CausalLM | None = None,
    ) -> None:
        """Join two drafters.

        Args:
            suffixes: drafts by suffixes.
            other: the other drafter.
            threshold: the least score of a suffix draft. It counts without a chooser only.
            chooser: weighs both drafters by costs.
            draft: the model of the other drafter, if texts that it has kept count as read.
        """
        self.suffixes = suffixes
        self.other = other
        self.threshold = threshold
        self.chooser = chooser
        self._draft = draft
        self._clock = draft.clock if draft is not None else perf_counter
        self.planner = HybridPlanner(suffixes, other)
        self.wants_hidden = other.wants_hidden
        self.extra_nodes = other.extra_nodes
        self.reads = other.reads  # of the hidden states; suffixes need the tokens alone
        self._read: dict[int, int] = {}  # tokens of each sequence that the other drafter has read
        # {sequence: a generator that makes the other drafter read on}, until its prompt is read
        self._unread: dict[int, Iterator[int]] = {}
        self._reading = -1  # the sequence whose prompt was read last, maybe in part
        self._chunk: ChunkSize = MAX_READ  # of the engine

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: ChunkSize) -> Iterator[int]:
        """Read a prompt for suffixes. The other drafter reads it later, if it is called."""
        yield from self.suffixes.admit(seq, hidden, chunk)
        unread = len(seq.tokens) if self.other.reads is None else self.other.reads
        known = 0
        if self._draft is not None:
            known = self._draft.prompts.known(seq.tokens, seq.request.cache_salt)
        self._read[seq.id] = max(known, len(seq.tokens) - unread)
        self._chunk = chunk
        self._unread[seq.id] = iter(self.other.admit(seq, hidden, self._size))
        if self.wants_hidden:
            for count in self._unread.pop(seq.id):
                self._read[seq.id] += count
                yield count

    def propose(self, seqs: list[Sequence]) -> Proposal:
        """Return suffix drafts, or drafts of the other drafter where it is to draft."""
        drafts: dict[int, Draft] = {}
        notes: dict[int, SuffixNote] = {}
        asking = []
        for seq in seqs:
            note = notes[seq.id] = self._note(seq, len(seqs))
            drafts[seq.id] = note.suffix
            if not note.choice.takes_suffix:
                drafts[seq.id] = Draft.root(seq.tokens[-1])
            if note.choice.asks_other:
                asking.append(seq)
        started_at = self._clock()
        ready = self._read_prompts(asking, notes) if asking else []
        reading = Proposal([], prompt_seconds=self._clock() - started_at)
        proposal = self._ask(ready, len(seqs)) if ready else Proposal([])
        is_measuring = isinstance(proposal.memo, GuardMemo) and proposal.memo.is_measuring
        for seq, draft in zip(ready, proposal.drafts, strict=True):
            if draft.drafted or is_measuring:
                drafts[seq.id] = draft
        asked = frozenset(seq.id for seq in ready)
        memo = HybridMemo(notes, asked, proposal.forwards, proposal.memo)
        return Proposal.together([drafts[seq.id] for seq in seqs], [proposal, reading], memo)

    def _note(self, seq: Sequence, rows: int) -> SuffixNote:
        """Find a row's suffix draft, and choose who drafts."""
        suffix, score = self.suffixes.find(seq, rows)
        length = len(seq.tokens)
        if self.chooser is None:
            asks_other = not suffix.drafted or score < self.threshold
            choice = Choice(takes_suffix=True, asks_other=asks_other, wants_other=asks_other)
            return SuffixNote(suffix, score, length, StepSituation(rows, length), choice)
        situation = self.chooser.situation(seq, rows, self._read[seq.id])
        choice = self.chooser.choose(situation, suffix, score)
        return SuffixNote(suffix, score, length, situation, choice)

    def _ask(self, seqs: list[Sequence], rows: int) -> Proposal:
        """Return the other drafter's proposal for some sequences of a step of N rows."""
        if isinstance(self.other, GuardedDrafter):
            return self.other.propose(seqs, rows)
        return self.other.propose(seqs)

    def _read_prompts(self, seqs: list[Sequence], step_ids: Collection[int]) -> list[Sequence]:
        """Have the other drafter read prompts, one after the other, up to a limit.

        Args:
            seqs: the sequences for which it is to draft.
            step_ids: those of all sequences of the step.

        Returns:
            The sequences whose prompts are read to the end. For the others it drafts later.
        """
        ids = [self._reading, *(seq.id for seq in seqs)]
        if self._reading in self._unread and self._reading not in step_ids:
            ids = []  # an error of that sequence must not end one of this step
        read = 0
        for id in ids:
            # The limit may fall meanwhile, because a request comes, which waits for the next step.
            while id in self._unread and read < self._limit():
                self._reading = id
                count = next(self._unread[id], None)
                if count is None:
                    del self._unread[id]
                else:
                    self._read[id] += count
                    read += count
        return [seq for seq in seqs if seq.id not in self._unread]

    def _limit(self) -> int:
        """Return how many tokens of prompts this step may wait for at present."""
        return MAX_READ if is_alone(self._chunk) else self._size()

    def _size(self) -> int:
        """Return the most tokens of the next chunk of a prompt."""
        return min(next_size(self._chunk), MAX_READ)

    def observe(self, outcomes: abc.Sequence[RowOutcome], memo: HybridMemo | None) -> None:
        """Pass outcomes on to the other drafter and to the chooser.

        Hidden states come only once, so a drafter that wants them observes every row. Without a
        memo the step is a plain one that a guard measures.
        """
        asked = memo.asked if memo is not None else frozenset()
        rows = [
            outcome for outcome in outcomes if self.wants_hidden or outcome.sequence.id in asked
        ]
        if rows:
            self.other.observe(rows, memo.inner if memo is not None else None)
        if self.chooser is None or memo is None:
            return
        for outcome in outcomes:
            note = memo.notes.get(outcome.sequence.id)
            if note is not None:
                self._observe_row(self.chooser, outcome, note, memo)

    def _observe_row(
        self, chooser: SourceChooser, outcome: RowOutcome, note: SuffixNote, memo: HybridMemo
    ) -> None:
        """Tell the chooser what came of a row, and count what the other drafter has read."""
        seq = outcome.sequence
        draft = outcome.draft
        is_asked = seq.id in memo.asked
        ran = memo.forwards and is_asked and not self.wants_hidden
        is_other = ran or (draft.drafted and draft is not note.suffix)
        forwards = memo.forwards if is_other else 0
        chooser.observe(
            SourceOutcome(
                suffix=note.suffix,
                score=note.score,
                used=draft,
                committed=seq.tokens[note.length :],
                forwards=forwards,
                ms=chooser.step_ms(note.situation, draft.drafted, forwards),
                wanted=note.choice.wants_other,
            )
        )
        if is_other or (self.wants_hidden and is_asked):
            self._read[seq.id] = len(seq.tokens)

    def drop(self, seq: Sequence) -> None:
        """Forget a sequence."""
        self._unread.pop(seq.id, None)
        self._read.pop(seq.id, None)
        self.suffixes.drop(seq)
        self.other.drop(seq)


def hybrid_drafter(settings: Hybrid, suffixes: SuffixDrafter, parts: Parts) -> Drafter:
    """Return the drafter of a hybrid method: suffixes alone if there is no other method."""
    kind = parts.head.kind if parts.head is not None else None
    has_layer = parts.pre_verifier is not None
    chosen = settings.resolve_defaults(parts.draft is not None, has_layer, kind)
    if chosen.other == "auto":
        return suffixes
    method = chosen.other_method()
    other = method.build(parts)
    if parts.guarded is not None:
        other = parts.guarded(other)
    if settings.threshold is not None:
        return HybridDrafter(suffixes, other, settings.threshold)
    if parts.present_costs is None:
        return HybridDrafter(suffixes, other, THRESHOLD_WITHOUT_COSTS)
    chooser = SourceChooser(parts.present_costs, _forwards_of(method))
    knows_texts = chooser.forwards == "draft" and parts.translation is None
    draft = parts.draft if knows_texts else None
    return HybridDrafter(suffixes, other, THRESHOLD_WITHOUT_COSTS, chooser, draft)


def _forwards_of(method: Method) -> Forwards | None:
    """Return what a method's drafter runs."""
    if method.head:
        return "head"
    return "draft" if method.needs_draft else None
