"""What all methods have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Callable

    from forerun.backends.heads import HiddenLM
    from forerun.engine.costs import Costs
    from forerun.engine.step import Drafter
    from forerun.heads.pre_verifier import PreVerifier
    from forerun.methods.pools import PhrasePool, SuffixMemory
    from forerun.model.causal_lm import CausalLM
    from forerun.text.vocabularies import Translation


@dataclass(frozen=True)
class Parts:
    """What a method is built from.

    Attributes:
        target, draft: models with caches of their own; no draft where no method needs one.
        pre_verifier: the trained layer of methods that need one.
        costs: what forwards cost on this machine, for methods that ask.
        pools: what outlives a sequence: phrases, by their length and their number a token, and outputs, by 0 and their
            number of tokens.
        head: what drafts from hidden states, of methods that need one.
        guarded: puts a guard of its own around a part of a drafter; None where there are to be none.
        translation: how a draft with another tokenizer drafts; None for the target's.
    """

    target: CausalLM
    draft: CausalLM | None = None
    pre_verifier: PreVerifier | None = None
    costs: Costs | None = None
    pools: dict[tuple[int, int], PhrasePool | SuffixMemory] | None = None
    head: HiddenLM | None = None
    guarded: Callable[[Drafter], Drafter] | None = None
    translation: Translation | None = None

    def pool(self, shape: tuple[int, int]) -> PhrasePool | None:
        """The pool of phrases of that length and number a token, None where phrases are not to outlive a sequence."""
        if self.pools is None:
            return None
        from forerun.methods.pools import PhrasePool

        pool = self.pools.setdefault(shape, PhrasePool(*shape))
        assert isinstance(pool, PhrasePool)
        return pool

    def memory(self, most: int) -> SuffixMemory | None:
        """The earlier outputs, N tokens at most, None where they are not to be kept."""
        if self.pools is None:
            return None
        from forerun.methods.pools import SuffixMemory

        memory = self.pools.setdefault((0, most), SuffixMemory(most))
        assert isinstance(memory, SuffixMemory)
        return memory


class Method(Protocol):
    """A method: its settings, a frozen dataclass, and `build`, which makes the drafter.

    A subclass needs a `name` and `build`; it inherits the rest, what a method without models or layers says of itself.

    Attributes:
        name: what users and results call it.
        needs_draft: whether it drafts with a model.
        greedy_only: whether it refuses sequences that are sampled.
        layer, kind: the trained layer it needs, by the name of the folder beside the models that come with forerun, and
            the kind of its output (see PreVerifierConfig).
        head: the kind of head over hidden states that it needs (`forerun.heads.heads.KINDS`).
        verification: of chains that were sampled, "block" or "token".
        warm: whether what it gathers outlives a sequence.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    name: ClassVar[str]
    needs_draft: ClassVar[bool] = False
    greedy_only: ClassVar[bool] = False
    layer: ClassVar[str | None] = None
    kind: ClassVar[str | None] = None
    head: ClassVar[str | None] = None
    verification: str = "token"
    warm: bool = False

    @property
    def needs_costs(self) -> bool:
        """Whether it uses a table of costs."""
        return False

    @property
    def any_tokenizer(self) -> bool:
        """Whether its draft model may have another tokenizer than the target."""
        return not self.needs_draft

    @property
    def phrases(self) -> tuple[int, int] | None:
        """Tokens of a phrase and how many phrases a token has at most, where it drafts by phrases; 0 and a number of
        tokens, where it drafts from that many of earlier outputs."""
        return None

    def resolve_defaults(self, draft: bool, layer: bool, head: str | None) -> Self:
        """The method where there is a draft model, its pre-verifier, or a head of that kind."""
        return self

    def build(self, parts: Parts) -> Drafter:
        """The drafter of an engine."""
        raise NotImplementedError


PARTS = [name for name in (*Method.__annotations__, *vars(Method)) if not name.startswith("_")]  # of every method


@dataclass(frozen=True)
class Sampling(Method):
    """Methods whose drafts may be sampled. Their `verification` is then that of the whole "block" of tokens
    (arXiv 2403.10444), or of one "token" after the other (arXiv 2211.17192)."""

    verification: str = field(default="block", kw_only=True)

    def __post_init__(self) -> None:
        if self.verification not in ("block", "token"):
            raise ValueError(f"verification must be block or token, not {self.verification!r}")


def at_least(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")


def between(name: str, value: float, low: float, high: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} must be a number from {low:g} to {high:g}, not {value!r}")


def true_or_false(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, not {value!r}")
