"""Settings of chains that a smaller model drafts, one for each rule that ends a draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from forerun.methods.base import Method, Parts, build_module, integer, number

if TYPE_CHECKING:
    from forerun.planning.stop_rules import LengthPolicy


class Drafting(Method):
    """A method that drafts chains with a draft model, ended by a length policy.

    A method from outside the package only writes `policy`.
    """

    needs_draft: ClassVar[bool] = True

    @property
    def any_tokenizer(self) -> bool:
        """Return whether the draft model may have another tokenizer than the target.

        Trained layers belong to pairs with one tokenizer.
        """
        return self.layer is None

    def policy(self, parts: Parts) -> LengthPolicy:
        """Return the length policy, which ends drafts."""
        policy: LengthPolicy = build_module().policy_of(self, parts)
        return policy


@dataclass(frozen=True)
class SD(Drafting):
    """Classic speculative decoding (Leviathan et al., arXiv 2211.17192).

    A draft model drafts `gamma` tokens per step. None ("auto") is the best length of each step by
    the table of costs (`BestLength`).
    """

    gamma: int | None = integer(None)
    name: ClassVar[str] = "sd"

    @property
    def needs_costs(self) -> bool:
        """Return whether the length follows from costs."""
        return self.gamma is None


@dataclass(frozen=True)
class Confidence(Drafting):
    """Draft until a token's own probability is below `threshold`.

    This is the rule of transformers' `assistant_confidence_threshold`, which starts at 0.4 and
    adapts. Here it is fixed. A greedy token's probability is that of the softmax of its scores. A
    draft has at most `most` tokens.
    """

    threshold: float = number(0.4, 0, 1)
    most: int = integer(32)
    name: ClassVar[str] = "confidence"


@dataclass(frozen=True)
class Cumulative(Drafting):
    """Draft until the product of the tokens' own probabilities is below `threshold`.

    The product estimates the probability that the whole draft is accepted. In greedy decoding the
    last token is not verified if the product is below `floor`. A good value of `floor` is the cost
    of one more verified token relative to a forward (ours). A draft has at most `most` tokens.
    """

    threshold: float = number(0.3, 0, 1)
    most: int = integer(32)
    floor: float = number(0.0, 0, 1)
    name: ClassVar[str] = "cumulative"


@dataclass(frozen=True)
class Pacer(Drafting):
    """Draft blocks of `block` tokens until a trained layer expects a rejection (arXiv 2602.01274).

    A draft ends when the survival of a block's last token is below `threshold`: the probability
    that all tokens up to it are accepted. None ("auto") is the best value by the table of costs.
    With a threshold, a block of None is 4. A draft has at most `most` tokens.
    """

    block: int | None = integer(None)
    threshold: float | None = number(None, 0, 1)
    most: int = integer(32)
    name: ClassVar[str] = "pacer"
    layer: ClassVar[str | None] = "pre-verifier"

    @property
    def needs_costs(self) -> bool:
        """Return whether the threshold follows from costs."""
        return self.threshold is None
