"""Suffix drafts if they are likely to be accepted, else another method's drafts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from forerun.engine.draft import Draft
from forerun.engine.step import Drafter, Proposal, observe_rows
from forerun.methods.base import Method, Parts, number
from forerun.methods.guard import Guarded
from forerun.methods.suffix import Suffix, SuffixDrafter

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.engine.acceptance import Verdict
    from forerun.engine.sequence import Sequence

ALONE = ("ar", "suffix", "hybrid")  # not allowed as `other`


@dataclass(frozen=True)
class Hybrid(Suffix):
    """Use the suffix draft if its score, its expected number of accepted tokens by counts, is at least `threshold`;
    else a draft of the method `other`: a name, or name and settings as in "cumulative:threshold=0.2:most=8".

    "auto" is the default method for the head or, without one, for the draft model. With neither, suffixes draft alone.
    """

    threshold: float = number(6.0, 0, 1000)
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
        return self.other != "auto" and self._other().needs_costs

    @property
    def any_tokenizer(self) -> bool:
        return self.other == "auto" or self._other().any_tokenizer

    def _other(self) -> Method:
        """Return the method `other`. Raises ValueError for an unknown name or bad settings."""
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
        other = chosen._other().build(parts)
        return HybridDrafter(suffixes, parts.guarded(other) if parts.guarded is not None else other, self.threshold)


class HybridDrafter(Drafter):
    """Draft by suffixes, and call the other drafter for sequences whose suffix draft scores below `threshold`. If it
    has no draft, the suffix draft is used.

    The other drafter may have a guard of its own, which judges it by the steps in which it drafted for all rows. In a
    pause of that guard suffixes draft for all rows. Plain steps that it measures stay plain.
    """

    def __init__(self, suffixes: SuffixDrafter, other: Drafter, threshold: float) -> None:
        self.suffixes, self.other, self.threshold = suffixes, other, threshold
        self.wants_hidden, self.spread = other.wants_hidden, other.spread
        self._asked: set[int] = set()  # sequences for which the other drafter was called in this step

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: int) -> Iterator[int]:
        yield from self.suffixes.admit(seq, hidden, chunk)
        yield from self.other.admit(seq, hidden, chunk)

    def propose(self, seqs: list[Sequence]) -> Proposal:
        drafts: dict[int, Draft] = {}
        rest = []
        for seq in seqs:
            drafts[seq.id], score = self.suffixes.find(seq, len(seqs))
            if score < self.threshold or not drafts[seq.id].drafted:
                rest.append(seq)
        self._asked, proposal, is_measuring = {seq.id for seq in rest}, Proposal([]), False
        if rest and isinstance(self.other, Guarded):
            proposal = self.other.propose(rest, len(seqs))
            is_measuring = self.other.is_measuring
        elif rest:
            proposal = self.other.propose(rest)
        for seq, draft in zip(rest, proposal.drafts, strict=True):
            if draft.drafted or is_measuring:
                drafts[seq.id] = draft
        return Proposal.together([drafts[seq.id] for seq in seqs], [proposal])

    def observe(
        self, seqs: list[Sequence], drafts: list[Draft], verdicts: list[Verdict], hidden: list[Tensor] | None
    ) -> None:
        # Hidden states come only once, so a drafter that wants them sees every step.
        rows = [row for row, seq in enumerate(seqs) if self.wants_hidden or seq.id in self._asked]
        observe_rows(self.other, rows, seqs, drafts, verdicts, hidden)
        self._asked = set()

    def drop(self, seq: Sequence) -> None:
        self.suffixes.drop(seq)
        self.other.drop(seq)
