"""What all methods have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from forerun.costs import Costs
    from forerun.drafters.phrases import PhrasePool
    from forerun.engine import Drafter
    from forerun.generation import Mode
    from forerun.lengths import LengthPolicy
    from forerun.lengths.oracle import Truth
    from forerun.model import CausalLM
    from forerun.nn.pre_verifier import PreVerifier
    from forerun.runtime.heads import HiddenLM


@dataclass(frozen=True)
class Parts:
    """What a method is built from.

    Attributes:
        target, draft: models with caches of their own; no draft where no method needs one.
        pre_verifier: the trained layer of methods that need one.
        costs: what forwards cost on this machine, for methods that ask.
        truth: what oracles know already; they add what they find out.
        pools: phrases that outlive a sequence, by their length and their number a token.
        head: what drafts from hidden states, of methods that need one.
        clocked: whether the costs were measured in this process, so that another process has others.
    """

    target: CausalLM
    draft: CausalLM | None = None
    pre_verifier: PreVerifier | None = None
    costs: Costs | None = None
    truth: Truth | None = None
    pools: dict[tuple[int, int], PhrasePool] | None = None
    head: HiddenLM | None = None
    clocked: bool = False

    def costs_for(self, mode: Mode) -> Costs | None:
        """The costs that drafts of sequences of this mode may depend on."""
        return None if mode == "seeded" and self.clocked else self.costs

    def pool(self, shape: tuple[int, int]) -> PhrasePool | None:
        """The pool of phrases of that length and number a token, None where phrases are not to outlive a sequence."""
        if self.pools is None:
            return None
        from forerun.drafters.phrases import PhrasePool

        return self.pools.setdefault(shape, PhrasePool(*shape))


class Settings:
    """What is asked of every method.

    Attributes:
        needs_draft: whether it drafts with a model.
        greedy_only: whether it refuses sequences that are sampled.
        layer, kind: the trained layer it needs, by the name of the embedded pair's, and the kind of its output (see
            PreVerifierConfig).
        head: the kind of head over hidden states that it needs (`forerun.nn.heads.KINDS`).
        needs_costs: whether it uses a table of costs.
        phrases: tokens of a phrase and how many phrases a token has at most, where it drafts by such.
    """

    needs_draft: ClassVar[bool] = False
    greedy_only: ClassVar[bool] = False
    layer: ClassVar[str | None] = None
    kind: ClassVar[str | None] = None
    head: ClassVar[str | None] = None

    @property
    def needs_costs(self) -> bool:
        return False

    @property
    def phrases(self) -> tuple[int, int] | None:
        return None


class Drafting(Settings):
    """A chain of the draft model, as long as the method's policy says."""

    needs_draft: ClassVar[bool] = True

    def policy(self, parts: Parts) -> LengthPolicy:
        raise NotImplementedError

    def build(self, parts: Parts) -> Drafter:
        from forerun.drafters.chain import ChainDrafter

        assert parts.draft is not None
        return ChainDrafter(parts.draft, self.policy(parts), parts.target.vocab_size, self.block_verified)

    @property
    def block_verified(self) -> bool:
        """Whether drafts that were sampled are verified as a whole."""
        return True


@dataclass(frozen=True)
class Sampling(Drafting):
    """Methods whose drafts may be sampled. Their `verification` is then that of the whole "block" of tokens
    (arXiv 2403.10444), or of one "token" after the other (arXiv 2211.17192)."""

    verification: str = field(default="block", kw_only=True)

    def __post_init__(self) -> None:
        if self.verification not in ("block", "token"):
            raise ValueError(f"verification must be block or token, not {self.verification!r}")

    @property
    def block_verified(self) -> bool:
        return self.verification == "block"


def at_least(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")


def between(name: str, value: float, low: float, high: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} must be a number from {low:g} to {high:g}, not {value!r}")
