"""Suffix drafts if they are likely to be accepted, else another method's drafts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from forerun.engine.draft import Draft
from forerun.engine.step import Drafter, Proposal, observe_rows
from forerun.methods.base import Method, Parts, number
from forerun.methods.guard import Guarded
from forerun.methods.stop import EXPECTED, MOST, best_length
from forerun.methods.suffix import Suffix, SuffixDrafter

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.engine.acceptance import Verdict
    from forerun.engine.costs import Costs
    from forerun.engine.sequence import Sequence

ALONE = ("ar", "suffix", "hybrid")  # not allowed as `other`
USUAL = 6.0  # the threshold if no costs are known
SHARES = (0.3, 0.35, 0.45, 0.6)  # of 1, 2, 3, and more tokens that counts promise: how many come true, as is expected
WEIGHT, KEPT = 4.0, 0.98  # what is expected counts as so many steps; a step counts `KEPT` times as much as the next


@dataclass(frozen=True)
class Hybrid(Suffix):
    """Use the suffix draft if its score, its expected number of accepted tokens by counts, is at least `threshold`;
    else a draft of the method `other`: a name, or name and settings as in "cumulative:threshold=0.2:most=8".
    A `threshold` of None ("auto") takes what is expected to need less time a token (`Balance`), and is 6 if no costs
    are known.

    "auto" as `other` is the default method for the head or, without one, for the draft model. With neither, suffixes
    draft alone.
    """

    threshold: float | None = number(None, 0, 1000)
    other: str = "auto"
    name: ClassVar[str] = "hybrid"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.other == "auto":
            return
        other = self._other()
        # It needs what `other` needs. These are no settings (fields) of the class.
        for name in ("needs_draft", "layer", "head"):
            object.__setattr__(self, name, getattr(other, name))

    @property
    def needs_costs(self) -> bool:
        return self.other != "auto" and (self.threshold is None or self._other().needs_costs)

    @property
    def any_tokenizer(self) -> bool:
        return self.other == "auto" or self._other().any_tokenizer

    def _other(self) -> Method:
        from forerun.methods import METHODS, method, parse_value

        name, *given = str(self.other).split(":")
        if given and "=" not in given[0]:
            name += f":{given.pop(0)}"  # of another package
        names = [each for each in METHODS if each not in ALONE]
        if name not in names and ":" not in name:
            raise ValueError(f"other must be auto, {', '.join(names[:-1])} or {names[-1]}, not {name!r}")
        settings = [each.partition("=") for each in given]
        keys = [key for key, *_ in settings]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise ValueError(f"other must give {twice[0]} once: {self.other!r}")
        return method(name, **{key: parse_value(name, key, value) for key, _, value in settings})

    def resolve_defaults(self, draft: bool, layer: bool, head: str | None) -> Hybrid:
        if self.other != "auto" or not (draft or head):
            return self
        from forerun.methods import default_method

        return replace(self, other=head or default_method(draft, layer))

    def build(self, parts: Parts) -> Drafter:
        head = parts.head.kind if parts.head is not None else None
        chosen = self.resolve_defaults(parts.draft is not None, parts.pre_verifier is not None, head)
        suffixes = self.suffixes(parts)
        if chosen.other == "auto":
            return suffixes
        method = chosen._other()
        balance = Balance(parts.costs, method) if self.threshold is None and parts.costs else None
        other = parts.guarded(method.build(parts)) if parts.guarded is not None else method.build(parts)
        return HybridDrafter(suffixes, other, USUAL if self.threshold is None else self.threshold, balance)


class Balance:
    """Weigh a suffix draft against the other drafter by the expected ms a token, from a table of costs. Ours.

    Counts promise too much, so scores are multiplied by the share of promises of their size that came true lately.
    Every step shows it, whoever drafted. Of the other drafter count what its steps drafted, took and brought. A method
    whose forwards no costs tell of counts as free.
    """

    def __init__(self, costs: Costs, other: Method) -> None:
        self._costs = {True: costs, False: costs.sampled}
        self._is_head, self._is_model = bool(other.head and costs.head), bool(other.needs_draft and costs.draft)
        steps = [n * self._price(costs, 1) + costs.verify(n + 1) for n in range(MOST + 1)]
        n = best_length(steps, [EXPECTED] * MOST)
        # of the other drafter: its steps, tokens that they drafted, its forwards, and tokens that came
        self._other = [WEIGHT, WEIGHT * n, WEIGHT * n, WEIGHT * sum(EXPECTED**i for i in range(n + 1))]
        self._promised = [WEIGHT * size for size in range(1, len(SHARES) + 1)]
        self._true = [share * promised for share, promised in zip(SHARES, self._promised, strict=True)]

    def prefers_suffix(self, greedy: bool, draft: Draft, score: float, rows: int) -> bool:
        """Return whether a suffix draft takes less time a token than the other drafter in a step of N rows."""
        costs, size, (steps, drafted, forwards, brought) = self._costs[greedy], self._size(score), self._other
        expected = min(score * self._true[size] / self._promised[size], draft.drafted)
        own = costs.verify(rows * (draft.drafted + 1)) / (1 + expected)
        other = forwards / steps * self._price(costs, rows) + costs.verify(rows * (drafted / steps + 1))
        return own <= other * steps / brought

    def _price(self, costs: Costs, rows: int) -> float:
        if self._is_head:
            return costs.heading(rows)
        return costs.drafting(rows) if self._is_model else 0.0

    def _size(self, score: float) -> int:
        return min(max(int(score), 1), len(SHARES)) - 1

    def observe(self, found: Draft, score: float, used: Draft, came: list[int], forwards: int) -> None:
        """Record the tokens of a step, where this suffix draft was found and that draft was used, after so many
        forwards of the other drafter."""
        if found.drafted:
            size, pairs = self._size(score), list(zip(found.tokens[1:], came, strict=False))
            right = next((n for n, (drafted, token) in enumerate(pairs) if drafted != token), len(pairs))
            seen = found.drafted if right < len(pairs) else right  # what would come after the last token is not known
            self._promised[size] = KEPT * self._promised[size] + score * seen / found.drafted
            self._true[size] = KEPT * self._true[size] + right
        if used.drafted and used is not found:
            step = 1, used.drafted, forwards, len(came)
            self._other = [KEPT * before + one for before, one in zip(self._other, step, strict=True)]


class HybridDrafter(Drafter):
    """Draft by suffixes, and call the other drafter for sequences whose suffix draft scores below `threshold`, or where
    `balance` prefers it. If it has no draft, the suffix draft is used.

    The other drafter may have a guard of its own, which judges it by the steps in which it drafted for all rows. In a
    pause of that guard suffixes draft for all rows. Plain steps that it measures stay plain.
    """

    def __init__(
        self, suffixes: SuffixDrafter, other: Drafter, threshold: float, balance: Balance | None = None
    ) -> None:
        self.suffixes, self.other, self.threshold, self.balance = suffixes, other, threshold, balance
        self.wants_hidden, self.spread = other.wants_hidden, other.spread
        self._asked: set[int] = set()  # sequences for which the other drafter was called in this step
        self._found: dict[int, tuple[Draft, float, int]] = {}  # suffix drafts, scores, and lengths of texts
        self._forwards = 0  # of the other drafter in this step

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: int) -> Iterator[int]:
        yield from self.suffixes.admit(seq, hidden, chunk)
        yield from self.other.admit(seq, hidden, chunk)

    def propose(self, seqs: list[Sequence]) -> Proposal:
        drafts: dict[int, Draft] = {}
        rest = []
        for seq in seqs:
            found, score = self.suffixes.find(seq, len(seqs))
            drafts[seq.id], is_sure = found, score >= self.threshold
            if self.balance is not None:
                is_sure = self.balance.prefers_suffix(seq.greedy, found, score, len(seqs))
            if not found.drafted or not is_sure:
                rest.append(seq)
            self._found[seq.id] = found, score, len(seq.tokens)
        self._asked, proposal, is_measuring = {seq.id for seq in rest}, Proposal([]), False
        if rest and isinstance(self.other, Guarded):
            proposal = self.other.propose(rest, len(seqs))
            is_measuring = self.other.is_measuring
        elif rest:
            proposal = self.other.propose(rest)
        for seq, draft in zip(rest, proposal.drafts, strict=True):
            if draft.drafted or is_measuring:
                drafts[seq.id] = draft
        self._forwards = proposal.forwards
        return Proposal.together([drafts[seq.id] for seq in seqs], [proposal])

    def observe(
        self, seqs: list[Sequence], drafts: list[Draft], verdicts: list[Verdict], hidden: list[Tensor] | None
    ) -> None:
        # Hidden states come only once, so a drafter that wants them sees every step.
        rows = [row for row, seq in enumerate(seqs) if self.wants_hidden or seq.id in self._asked]
        observe_rows(self.other, rows, seqs, drafts, verdicts, hidden)
        for seq, draft in zip(seqs, drafts, strict=True):
            if self.balance is not None and seq.id in self._found:  # else a plain step that others measure
                found, score, length = self._found[seq.id]
                self.balance.observe(found, score, draft, seq.tokens[length:], self._forwards)
        self._asked, self._found = set(), {}

    def drop(self, seq: Sequence) -> None:
        self.suffixes.drop(seq)
        self.other.drop(seq)
