"""Suffix drafting, alone and before another method."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from forerun.methods.settings import Parts, Settings, at_least, between

if TYPE_CHECKING:
    from forerun.drafters.suffix import SuffixDrafter
    from forerun.engine import Drafter

ALONE = ("ar", "suffix", "hybrid", "oracle", "seeing-oracle")  # methods that `hybrid` has no use for


@dataclass(frozen=True)
class Suffix(Settings):
    """Suffix drafting (arXiv 2411.04975): what followed the longest stretch that the text ends with, in the text itself
    or in earlier outputs.

    At most `factor` * match + `offset` tokens and at most `most`, the best `width` of each place (1: a chain), none
    whose path is less probable than `least` by its counts. Earlier outputs have up to `memory` tokens together, and are
    there where it is `warm`.

    The defaults are ours, for a CPU: there every token that is verified costs. Where it is free, longer drafts pay.
    """

    factor: float = 1.0
    offset: float = 0.0
    most: int = 16
    width: int = 1
    least: float = 0.3
    memory: int = 65536
    warm: bool = True
    name: ClassVar[str] = "suffix"

    def __post_init__(self) -> None:
        between("factor", self.factor, 0, 100)
        between("offset", self.offset, 0, 100)
        at_least("most", self.most, 1)
        at_least("width", self.width, 1)
        between("least", self.least, 0, 1)
        at_least("memory", self.memory, 1)
        if not isinstance(self.warm, bool):
            raise ValueError(f"warm must be true or false, not {self.warm!r}")

    @property
    def phrases(self) -> tuple[int, int]:
        """A memory: its texts have no fixed length, hence the 0."""
        return 0, self.memory

    def build(self, parts: Parts) -> Drafter:
        return self.suffixes(parts)

    def suffixes(self, parts: Parts) -> SuffixDrafter:
        from forerun.drafters.suffix import SuffixDrafter

        kept = parts.memory(self.memory) if self.warm else None
        return SuffixDrafter(self.factor, self.offset, self.most, self.width, self.least, kept)


@dataclass(frozen=True)
class Hybrid(Suffix):
    """Suffix drafts where their score, the tokens of them that counts say are right, is at least `threshold`; else
    those of the method `other`: its name, or name and settings as in "cumulative:threshold=0.2:most=8".

    For "auto" that is the method of what is there: of a head, else of a draft model, with its pre-verifier or without.
    Where nothing is there, suffixes draft alone.
    """

    threshold: float = 6.0
    other: str = "auto"
    name: ClassVar[str] = "hybrid"

    def __post_init__(self) -> None:
        super().__post_init__()
        between("threshold", self.threshold, 0, 1000)
        if self.other == "auto":
            return
        from forerun.methods import METHODS

        names = [name for name in METHODS if name not in ALONE]
        if (name := str(self.other).split(":")[0]) not in names:
            raise ValueError(f"other must be auto, {', '.join(names[:-1])} or {names[-1]}, not {name!r}")
        self._other()  # raises for its settings
        # It needs what the other one needs. Of the class these are no settings.
        for each in ("needs_draft", "layer", "kind", "head"):
            object.__setattr__(self, each, getattr(METHODS[name], each))

    @property
    def needs_costs(self) -> bool:
        return self.other != "auto" and self._other().needs_costs

    @property
    def any_tokenizer(self) -> bool:
        return self.other == "auto" or self._other().any_tokenizer

    def _other(self) -> Any:
        from forerun.methods import method, parse_value

        name, *given = self.other.split(":")
        settings = [each.partition("=") for each in given]
        keys = [key for key, *_ in settings]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise ValueError(f"other gives {twice[0]} twice: {self.other!r}")
        return method(name, **{key: parse_value(name, key, value) for key, _, value in settings})

    def given(self, draft: bool, layer: bool, head: str | None) -> Hybrid:
        if self.other != "auto" or not (draft or head):
            return self
        from forerun.methods import default_method

        return replace(self, other=head or default_method(draft, layer))

    def build(self, parts: Parts) -> Drafter:
        head = parts.head.kind if parts.head is not None else None
        chosen = self.given(parts.draft is not None, parts.pre_verifier is not None, head)
        suffixes = self.suffixes(parts)
        if chosen.other == "auto":
            return suffixes
        from forerun.drafters.hybrid import HybridDrafter

        other = chosen._other().build(parts)
        return HybridDrafter(suffixes, parts.guarded(other) if parts.guarded is not None else other, self.threshold)
