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
from forerun.methods import Hybrid, Method, Parts
from forerun.methods.stop import EXPECTED, MOST, best_length
from forerun.planning.guard import Guarded, GuardMemo

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.engine.sequence import Sequence
    from forerun.engine.step import RowOutcome
    from forerun.model.causal_lm import CausalLM
    from forerun.planning.cost_model import Costs

USUAL = 6.0  # the threshold if no costs are known
SHARES = (
    0.3,
    0.35,
    0.45,
    0.6,
)  # of 1, 2, 3, and more tokens that counts promise: how many come true, as is expected
WEIGHT, KEPT = (
    4.0,
    0.98,
)  # what is expected counts as so many steps; a step counts `KEPT` times as much as the next
PIECE = 2048  # most tokens of prompts that a step waits for
FIRST, REST = (
    0.5,
    128,
)  # expected: the other drafter's share of tokens, and tokens to come beside as many as there are


class Balance:
    """Weigh a suffix draft, the other drafter and a plain step by expected ms, from a table of costs. Ours.

    A token is worth the ms that one took lately: where suffixes draft nearly all, the other drafter must not draft
    slowly what they would soon draft. Counts promise too much, so scores are multiplied by the share of promises of
    their size that came true lately. Every step shows it, whoever drafted. Of the other drafter count what its steps
    drafted, took and brought; while it is not asked, this is forgotten. Forwards that no costs tell of are free.

    A draft model or a head first reads what it has not read of a text. That must be made good by this step, or by the
    tokens to come, as many of which are its own as lately would have been.
    """

    def __init__(self, costs: Costs, other: Method, draft: CausalLM | None = None) -> None:
        self._costs = {True: costs, False: costs.sampled}
        self._is_head, self._is_model = (
            bool(other.head and costs.head),
            bool(other.needs_draft and costs.draft),
        )
        self._draft = draft if self._is_model else None
        steps = [self.spent(True, 1, n, n) for n in range(MOST + 1)]
        n = best_length(steps, [EXPECTED] * MOST)
        # of the other drafter: its steps, tokens that they drafted, its forwards, and tokens that came
        self._usual = [
            WEIGHT,
            WEIGHT * n,
            WEIGHT * n,
            WEIGHT * sum(EXPECTED**i for i in range(n + 1)),
        ]
        self._other, self._share = self._usual, FIRST
        self._spent = [WEIGHT * steps[n], self._usual[3]]  # ms of all steps, and tokens that came
        self._promised = [WEIGHT * size for size in range(1, len(SHARES) + 1)]
        self._true = [
            share * promised for share, promised in zip(SHARES, self._promised, strict=True)
        ]

    def known(self, seq: Sequence) -> int:
        """Return how many tokens of a new sequence the draft model has kept."""
        return (
            self._draft.prompts.known(seq.tokens, seq.request.salt)
            if self._draft is not None
            else 0
        )

    def saved(
        self, greedy: bool, draft: Draft, score: float, rows: int, context: int = 0
    ) -> tuple[float, float]:
        """Return the ms that a step of N rows is expected to save with suffix drafts, against a plain one, and the ms a
        token with the other drafter, if it has read all, against the better of these. The other rows are taken to have
        this one's context."""
        size, (_, drafted, forwards, brought) = (
            self._size(score),
            [each / self._other[0] for each in self._other],
        )
        expected = min(score * self._true[size] / self._promised[size], draft.drafted)
        worth, plain = self._spent[0] / self._spent[1], self.spent(greedy, rows, context=context)
        own = worth * expected - self.spent(greedy, rows, draft.drafted, context=context) + plain
        other = worth * (brought - 1) - self.spent(greedy, rows, drafted, forwards, context) + plain
        return own, (other - max(own, 0.0)) / brought

    def spent(
        self, greedy: bool, rows: int, drafted: float = 0, forwards: float = 0, context: int = 0
    ) -> float:
        """Return ms of a step of N rows which draft so many tokens each, in so many forwards of the other
        drafter, after `context` tokens."""
        costs = self._costs[greedy].at(context, rows)
        price = (
            costs.heading(rows)
            if self._is_head
            else costs.drafting(rows)
            if self._is_model
            else 0.0
        )
        return forwards * price + costs.verify(rows * (drafted + 1))

    def pays(self, saved: float, unread: int, left: int, rows: int, read: int = 0) -> bool:
        """Return whether the other drafter, which saves so many ms a token, pays in a text with so many unread tokens
        after those read, and tokens to come. The other rows are taken to be like this one."""
        reading = self._reading(rows, read + unread / 2)
        later = max(
            0.0, self._share * saved - (1 - self._share) * self._reading(rows, read + unread)
        )
        return (
            saved > 0 and saved * self._other[3] / self._other[0] + later * left >= reading * unread
        )

    def _reading(self, tokens: int, context: float) -> float:
        """Return ms in which the other drafter reads so many tokens after `context` tokens."""
        if not self._is_model and not self._is_head:
            return 0.0
        return self._costs[True].at(context).reading(tokens, self._is_head)

    def _size(self, score: float) -> int:
        return min(max(int(score), 1), len(SHARES)) - 1

    def observe(
        self,
        found: Draft,
        score: float,
        used: Draft,
        came: list[int],
        forwards: int,
        spent: float,
        wanted: bool,
    ) -> None:
        """Record the tokens of a step of so many ms by the table, where this suffix draft was found and that draft was
        used, after so many forwards of the other drafter, which was `wanted` if it had read all."""
        if found.drafted:
            size, pairs = self._size(score), list(zip(found.tokens[1:], came, strict=False))
            right = next(
                (n for n, (drafted, token) in enumerate(pairs) if drafted != token), len(pairs)
            )
            seen = (
                found.drafted if right < len(pairs) else right
            )  # what would come after the last token is not known
            self._promised[size] = KEPT * self._promised[size] + score * seen / found.drafted
            self._true[size] = KEPT * self._true[size] + right
        step = [(1 - KEPT) * usual for usual in self._usual]
        own = used is not found
        if forwards or (own and used.drafted):  # it may have run and proposed nothing
            step = [1, used.drafted if own else 0, forwards, len(came) if own else 1]
        self._other = [KEPT * before + one for before, one in zip(self._other, step, strict=True)]
        self._spent = [
            KEPT * before + one for before, one in zip(self._spent, (spent, len(came)), strict=True)
        ]
        self._share += (1 - KEPT ** len(came)) * (wanted - self._share)


@dataclass(frozen=True)
class SuffixNote:
    """What was known of a sequence before a step.

    Attributes:
        found: its suffix draft.
        score: the draft's expected number of accepted tokens.
        length: of its text.
        wanted: whether the other drafter was expected to be faster.
    """

    found: Draft
    score: float
    length: int
    wanted: bool


@dataclass(frozen=True)
class HybridMemo:
    """What a hybrid drafter keeps of a step until it observes it.

    Attributes:
        notes: {sequence: what was known of it}.
        asked: the sequences for which the other drafter was called.
        forwards: of the other drafter.
        inner: the other drafter's own memo, None if it was not called.
    """

    notes: dict[int, SuffixNote]
    asked: frozenset[int]
    forwards: int
    inner: Any


class HybridDrafter(Drafter):
    """Draft by suffixes, and call the other drafter for sequences whose suffix draft scores below `threshold`, or where
    `balance` prefers it. If it has no draft, the suffix draft is used, unless `balance` prefers none.

    The other drafter reads a prompt when it is first called: `PIECE` tokens a step for the only row, else a chunk. One
    that wants hidden states gets them at once, and reads by itself. It may have a guard of its own, which judges it by
    the steps in which it drafted for all rows. In a pause of that guard suffixes draft for all rows. Plain steps that
    it measures stay plain.
    """

    def __init__(
        self,
        suffixes: SuffixDrafter,
        other: Drafter,
        threshold: float,
        balance: Balance | None = None,
    ) -> None:
        self.suffixes, self.other, self.threshold, self.balance = (
            suffixes,
            other,
            threshold,
            balance,
        )
        self.wants_hidden, self.spread = other.wants_hidden, other.spread
        self._read: dict[int, int] = {}  # tokens of each sequence that the other drafter has read
        self._unread: dict[int, Iterator[int]] = {}  # what reads a prompt that it has not read
        self._reading = -1  # the sequence whose prompt it reads, or has read last
        self._chunk = PIECE  # tokens of prompts to read in a step of several rows

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: int) -> Iterator[int]:
        yield from self.suffixes.admit(seq, hidden, chunk)
        unread = len(seq.tokens) if self.other.reads is None else self.other.reads
        known = self.balance.known(seq) if self.balance is not None else 0
        self._read[seq.id] = max(known, len(seq.tokens) - unread)
        self._chunk = min(chunk, PIECE)
        self._unread[seq.id] = iter(self.other.admit(seq, hidden, self._chunk))
        for count in self._unread.pop(seq.id) if self.wants_hidden else ():
            self._read[seq.id] += count
            yield count

    def propose(self, seqs: list[Sequence]) -> Proposal:
        drafts: dict[int, Draft] = {}
        notes: dict[int, SuffixNote] = {}
        rest, rows = [], len(seqs)
        for seq in seqs:
            found, score = self.suffixes.find(seq, rows)
            drafts[seq.id], asks, saved = found, not found.drafted or score < self.threshold, 0.0
            if self.balance is not None:
                own, saved = self.balance.saved(seq.greedy, found, score, rows, len(seq.tokens))
                drafts[seq.id] = found if own > 0 else Draft.root(seq.tokens[-1])
                left = min(seq.remaining, REST + len(seq.tokens) - seq.prompt_length)
                read = self._read[seq.id]
                asks = self.balance.pays(saved, len(seq.tokens) - read, left, rows, read)
            if asks:
                rest.append(seq)
            notes[seq.id] = SuffixNote(found, score, len(seq.tokens), saved > 0)
        begun = perf_counter()
        rest = self._readers(rest, notes) if rest else []
        reading = Proposal([], prompt_seconds=perf_counter() - begun)
        proposal = self._ask(rest, rows) if rest else Proposal([])
        is_measuring = isinstance(proposal.memo, GuardMemo) and proposal.memo.is_measuring
        for seq, draft in zip(rest, proposal.drafts, strict=True):
            if draft.drafted or is_measuring:
                drafts[seq.id] = draft
        asked = frozenset(seq.id for seq in rest)
        memo = HybridMemo(notes, asked, proposal.forwards, proposal.memo)
        return Proposal.together([drafts[seq.id] for seq in seqs], [proposal, reading], memo)

    def _ask(self, seqs: list[Sequence], rows: int) -> Proposal:
        """Return the other drafter's proposal for these sequences of a step of N rows."""
        if isinstance(self.other, Guarded):
            return self.other.propose(seqs, rows)
        return self.other.propose(seqs)

    def _readers(self, seqs: list[Sequence], step: Collection[int]) -> list[Sequence]:
        """Have the other drafter read prompts, one after the other; return the sequences whose prompts are read.
        `step`: the ids of all sequences of the step."""
        left = self._chunk if len(step) > 1 else PIECE
        if self._reading in self._unread and self._reading not in step:
            left = 0  # an error of that sequence must not end one of this step
        for id in (self._reading, *(seq.id for seq in seqs)):
            while id in self._unread and left > 0:
                self._reading, count = id, next(self._unread[id], None)
                if count is None:
                    del self._unread[id]
                self._read[id] += count or 0
                left -= count or 0
        return [seq for seq in seqs if seq.id not in self._unread]

    def observe(self, outcomes: abc.Sequence[RowOutcome], memo: HybridMemo | None) -> None:
        # Hidden states come only once, so a drafter that wants them sees every step.
        asked = memo.asked if memo is not None else frozenset()
        rows = [
            outcome for outcome in outcomes if self.wants_hidden or outcome.sequence.id in asked
        ]
        if rows:
            self.other.observe(rows, memo.inner if memo is not None else None)
        if self.balance is None or memo is None:
            return  # without a memo it is a plain step that others measure
        for outcome in outcomes:
            seq, draft = outcome.sequence, outcome.draft
            note, is_asked = memo.notes.get(seq.id), seq.id in asked
            if note is None:
                continue
            ran = memo.forwards and is_asked and not self.wants_hidden
            is_other = ran or (draft.drafted and draft is not note.found)
            forwards = memo.forwards if is_other else 0
            spent = self.balance.spent(
                seq.greedy, len(outcomes), draft.drafted, forwards, note.length
            )
            came = seq.tokens[note.length :]
            self.balance.observe(note.found, note.score, draft, came, forwards, spent, note.wanted)
            if is_other or (self.wants_hidden and is_asked):
                self._read[seq.id] = len(seq.tokens)

    def drop(self, seq: Sequence) -> None:
        for each in (self._unread, self._read):
            each.pop(seq.id, None)
        self.suffixes.drop(seq)
        self.other.drop(seq)


def hybrid_drafter(settings: Hybrid, suffixes: SuffixDrafter, parts: Parts) -> Drafter:
    """Return the drafter of a hybrid method: suffixes alone if there is no other method."""
    kind = parts.head.kind if parts.head is not None else None
    chosen = settings.resolve_defaults(
        parts.draft is not None, parts.pre_verifier is not None, kind
    )
    if chosen.other == "auto":
        return suffixes
    method = chosen.other_method()
    other = method.build(parts)
    if parts.guarded is not None:
        other = parts.guarded(other)
    if settings.threshold is not None:
        return HybridDrafter(suffixes, other, settings.threshold)
    if parts.costs is None:
        return HybridDrafter(suffixes, other, USUAL)
    draft = parts.draft if parts.translation is None else None
    return HybridDrafter(suffixes, other, USUAL, Balance(parts.costs, method, draft))
