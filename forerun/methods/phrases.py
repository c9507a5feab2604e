"""The methods that draft by phrases."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from forerun.methods.chains import Pacer
from forerun.methods.settings import Drafting, Parts, Sampling, Settings, at_least, between

if TYPE_CHECKING:
    from forerun.costs import Costs
    from forerun.engine import Drafter
    from forerun.generation import Mode
    from forerun.lengths import LengthPolicy

SOURCES = ("prompt", "output", "rejected", "suffixes")  # of phrases, beside the window


@dataclass(frozen=True)
class _Phrases(Sampling, Drafting):
    """Settings of drafting by phrases: a window of `window` columns (0: none), at most `guesses` phrases of `ngram` - 1
    tokens in a draft's forward, and up to `suffixes` of them behind the draft. `sources` are those of phrases, with +
    between them. `warm`: phrases of greedy output outlive it."""

    window: int = 0
    guesses: int = 1
    ngram: int = 5
    suffixes: int = 1
    sources: str = "prompt+output+rejected+suffixes"
    warm: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("window", self.window, 0)
        at_least("guesses", self.guesses, 0)
        at_least("ngram", self.ngram, 2)
        at_least("suffixes", self.suffixes, 0)
        if not isinstance(self.warm, bool):
            raise ValueError(f"warm must be true or false, not {self.warm!r}")
        if not isinstance(self.sources, str):
            raise ValueError(f"sources must be names with + between them, not {self.sources!r}")
        for source in filter(None, self.sources.split("+")):
            if source not in SOURCES:
                raise ValueError(f"sources must be of {'+'.join(SOURCES)}, not {source!r}")

    @property
    def any_tokenizer(self) -> bool:
        return False  # a phrase has tokens that target and draft must share

    @property
    def phrases(self) -> tuple[int, int]:
        return self.ngram - 1, max(self.guesses, self.suffixes, 1)

    def build(self, parts: Parts) -> Drafter:
        from forerun.drafters.ouroboros import OuroborosDrafter

        assert parts.draft is not None
        return OuroborosDrafter(
            parts.draft,
            self.policy(parts),
            parts.target.vocab_size,
            self.verification == "block",
            width=self.window,
            guesses=self.guesses,
            shape=self.phrases,
            suffixes=self.suffixes,
            sources=self.sources.split("+"),
            pool=parts.pool(self.phrases) if self.warm else None,
            most_greedy=self.most_greedy,
        )

    @property
    def most_greedy(self) -> int | None:
        """Greedy sequences that are drafted by phrases beside each other, at most; None for any number."""
        return None


@dataclass(frozen=True)
class Ouroboros(_Phrases):
    """Drafts `gamma` tokens, several a forward where phrases foresaw them (arXiv 2402.13720)."""

    gamma: int = 10
    name: ClassVar[str] = "ouroboros"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("gamma", self.gamma, 1)

    def policy(self, parts: Parts) -> LengthPolicy:
        from forerun.lengths import FixedLength

        return FixedLength(self.gamma)


@dataclass(frozen=True)
class PacerOuroboros(_Phrases, Pacer):
    """Pacer's rule on drafts by phrases. Its costs assume `share` forwards for a drafted token.

    In steps of more than `rows` greedy sequences these go without phrases: each saves forwards at other places than its
    neighbours, and checking phrases makes forwards larger.
    """

    ngram: int = 9
    suffixes: int = 0  # a draft that the layer has ended is hardly ever accepted to its end
    share: float = 0.3
    rows: int = 3
    name: ClassVar[str] = "pacer-ouroboros"

    def __post_init__(self) -> None:
        super().__post_init__()
        between("share", self.share, 0, 1)
        at_least("rows", self.rows, 1)

    @property
    def most_greedy(self) -> int:
        return self.rows

    def costs(self, parts: Parts, mode: Mode, rows: int) -> Costs | None:
        costs = parts.costs
        if costs is None or rows > self.rows:
            return costs
        ms = self.share * costs.drafting(1 + (self.guesses + self.window) * (self.ngram - 1))
        return replace(costs, draft={1: ms}, chained=0.0, chained_sampled=0.0)


@dataclass(frozen=True)
class Lookahead(Settings):
    """Lookahead decoding: the target makes phrases and checks them in its own forwards (arXiv 2402.02057)."""

    window: int = 4
    guesses: int = 4
    ngram: int = 4
    warm: bool = True
    name: ClassVar[str] = "lookahead"

    def __post_init__(self) -> None:
        at_least("window", self.window, 0)
        at_least("guesses", self.guesses, 1)
        at_least("ngram", self.ngram, 2)

    @property
    def phrases(self) -> tuple[int, int]:
        return self.ngram - 1, self.guesses

    def build(self, parts: Parts) -> Drafter:
        from forerun.drafters.lookahead import LookaheadDrafter

        pool = parts.pool(self.phrases) if self.warm else None
        return LookaheadDrafter(self.window, self.guesses, self.ngram - 1, pool)
