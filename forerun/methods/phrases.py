"""Settings of drafting by phrases (Ouroboros, arXiv 2402.13720)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from forerun.methods.base import flag, integer, number
from forerun.methods.model_chain import Drafting, Pacer


@dataclass(frozen=True)
class Phrases(Drafting):
    """Draft with a draft model, several tokens per forward where a phrase has them.

    Phrases come from the text, and from what the target said in place of rejected tokens and of
    phrases after a draft. Each sampled sequence has a pool of its own, because phrases after a
    draft consume random numbers. `Ouroboros` describes the settings.
    """

    guesses: int = integer(1, 0)
    ngram: int = integer(5, 2)
    suffixes: int = integer(1, 0)
    warm: bool = flag(True)

    @property
    def any_tokenizer(self) -> bool:
        """Return False, because phrases need one vocabulary for target and draft."""
        return False

    @property
    def phrases(self) -> tuple[int, int]:
        """Return the shape of the pool of phrases."""
        return self.ngram - 1, max(self.guesses, self.suffixes, 1)


@dataclass(frozen=True)
class Ouroboros(Phrases):
    """Draft `gamma` tokens, several per forward if phrases have them (arXiv 2402.13720).

    A draft forward checks at most `guesses` phrases of `ngram` - 1 tokens. At most `suffixes`
    phrases become branches after the draft, which cost the draft model nothing. If `warm`, phrases
    of greedy output outlive their sequence.
    """

    gamma: int = integer(10)
    name: ClassVar[str] = "ouroboros"


@dataclass(frozen=True)
class PacerOuroboros(Phrases, Pacer):
    """Draft by phrases until Pacer's trained layer expects a rejection.

    Costs assume `share` forwards per drafted token. The other settings are those of `ouroboros` and
    `pacer`.
    """

    ngram: int = integer(9, 2)
    suffixes: int = integer(0, 0)  # a draft that the layer ended is hardly ever accepted whole
    share: float = number(0.3, 0, 1)
    name: ClassVar[str] = "pacer-ouroboros"
