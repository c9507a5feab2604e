"""Plain decoding and the methods that draft a chain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from forerun.methods.settings import Drafting, Parts, Sampling, Settings, at_least, between

if TYPE_CHECKING:
    from forerun.costs import Costs
    from forerun.engine import Drafter
    from forerun.generation import Mode
    from forerun.lengths import LengthPolicy
    from forerun.lengths.oracle import MismatchStop


@dataclass(frozen=True)
class AR(Settings):
    """Plain autoregressive decoding, the baseline."""

    name: ClassVar[str] = "ar"

    def build(self, parts: Parts) -> Drafter:
        from forerun.drafters.plain import PlainDrafter

        return PlainDrafter()


@dataclass(frozen=True)
class SD(Sampling, Drafting):
    """Classic speculative decoding: a draft model proposes `gamma` tokens a step."""

    gamma: int = 5
    name: ClassVar[str] = "sd"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("gamma", self.gamma, 1)

    def policy(self, parts: Parts) -> LengthPolicy:
        from forerun.lengths import FixedLength

        return FixedLength(self.gamma)


@dataclass(frozen=True)
class Lookup(Settings):
    """Prompt lookup: proposes up to `gamma` tokens that once followed the last `ngram` or fewer tokens."""

    gamma: int = 8
    ngram: int = 3
    name: ClassVar[str] = "lookup"

    def __post_init__(self) -> None:
        at_least("gamma", self.gamma, 1)
        at_least("ngram", self.ngram, 1)

    def build(self, parts: Parts) -> Drafter:
        from forerun.drafters.lookup import LookupDrafter

        return LookupDrafter(self.gamma, self.ngram)


@dataclass(frozen=True)
class Pacer(Sampling, Drafting):
    """Drafts blocks of `block` tokens until a trained layer finds that the target will not follow.

    A block of None ("auto") is the best size by the table of costs; 4 where a threshold is given.

    It stops behind a block where the `score` of its tokens' survival, their last, mean or min, is below `threshold`; a
    threshold of None ("auto") is the best one by the table of costs.
    """

    block: int | None = None
    threshold: float | None = None
    score: str = "last"
    most: int = 32
    name: ClassVar[str] = "pacer"
    layer: ClassVar[str | None] = "pre-verifier"
    kind: ClassVar[str | None] = "survival"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block is not None:
            at_least("block", self.block, 1)
        if self.threshold is not None:
            between("threshold", self.threshold, 0, 1)
        if self.score not in ("last", "mean", "min"):
            raise ValueError(f"score must be last, mean or min, not {self.score!r}")
        at_least("most", self.most, 1)

    @property
    def needs_costs(self) -> bool:
        return self.threshold is None

    def policy(self, parts: Parts) -> LengthPolicy:
        from forerun.lengths.pacer import PacerStop

        assert parts.draft is not None and parts.pre_verifier is not None
        return PacerStop(
            parts.pre_verifier,
            parts.draft.model.get_input_embeddings(),
            self.block,
            self.most,
            self.threshold,
            self.score,
            lambda mode, rows: self.costs(parts, mode, rows),
        )

    def costs(self, parts: Parts, mode: Mode, rows: int) -> Costs | None:
        """The table for so many rows of a mode that stop together."""
        return parts.costs


@dataclass(frozen=True)
class SpecDec(Sampling, Drafting):
    """SpecDec++: stops where a trained head finds a rejected token in the draft more probable than `threshold`."""

    threshold: float = 0.3
    most: int = 32
    name: ClassVar[str] = "specdec++"
    layer: ClassVar[str | None] = "specdec++"
    kind: ClassVar[str | None] = "acceptance"

    def __post_init__(self) -> None:
        super().__post_init__()
        between("threshold", self.threshold, 0, 1)
        at_least("most", self.most, 1)

    def policy(self, parts: Parts) -> LengthPolicy:
        from forerun.lengths.pacer import PacerStop

        assert parts.draft is not None and parts.pre_verifier is not None
        embeddings = parts.draft.model.get_input_embeddings()
        return PacerStop(parts.pre_verifier, embeddings, 1, self.most, 1 - self.threshold)


# In the methods that stop by a rule, `most` is where a draft ends at the latest.
_MOST = 32


@dataclass(frozen=True)
class Heuristic(Sampling, Drafting):
    """Transformers' schedule: `gamma` tokens at first, two more where all were accepted, else one fewer."""

    gamma: int = 5
    name: ClassVar[str] = "heuristic"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("gamma", self.gamma, 1)

    def policy(self, parts: Parts) -> LengthPolicy:
        from forerun.lengths.schedule import HeuristicSchedule

        return HeuristicSchedule(self.gamma)


@dataclass(frozen=True)
class Confidence(Sampling, Drafting):
    """Drafts until a token's own probability falls below `threshold`."""

    threshold: float = 0.4
    most: int = _MOST
    name: ClassVar[str] = "confidence"

    def __post_init__(self) -> None:
        super().__post_init__()
        between("threshold", self.threshold, 0, 1)
        at_least("most", self.most, 1)

    def policy(self, parts: Parts) -> LengthPolicy:
        from forerun.lengths.confidence import ConfidenceStop

        return ConfidenceStop(self.threshold, self.most)


@dataclass(frozen=True)
class Cumulative(Sampling, Drafting):
    """Drafts until the product of the tokens' own probabilities falls below `threshold`."""

    threshold: float = 0.3
    most: int = _MOST
    name: ClassVar[str] = "cumulative"

    def __post_init__(self) -> None:
        super().__post_init__()
        between("threshold", self.threshold, 0, 1)
        at_least("most", self.most, 1)

    def policy(self, parts: Parts) -> LengthPolicy:
        from forerun.lengths.confidence import CumulativeStop

        return CumulativeStop(self.threshold, self.most)


@dataclass(frozen=True)
class SVIP(Sampling, Drafting):
    """Drafts until `1 - sqrt(scale * entropy)` falls below `threshold`; both as in the authors' code."""

    threshold: float = 0.7
    scale: float = 0.15
    most: int = _MOST
    name: ClassVar[str] = "svip"

    def __post_init__(self) -> None:
        super().__post_init__()
        between("threshold", self.threshold, 0, 1)
        between("scale", self.scale, 0, 100)
        at_least("most", self.most, 1)

    def policy(self, parts: Parts) -> LengthPolicy:
        from forerun.lengths.entropy import EntropyStop

        return EntropyStop(self.threshold, self.scale, self.most)


@dataclass(frozen=True)
class AdaEDL(Sampling, Drafting):
    """As SVIP, with a threshold that moves by about a tenth of `step` a draft to hold the acceptance rate at `goal`.

    All but `threshold`, the first one, and `most` are the paper's values.
    """

    threshold: float = 0.5
    scale: float = 0.2
    goal: float = 0.9
    step: float = 0.01
    most: int = _MOST
    name: ClassVar[str] = "adaedl"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("threshold", "goal", "step"):
            between(name, getattr(self, name), 0, 1)
        between("scale", self.scale, 0, 100)
        at_least("most", self.most, 1)

    def policy(self, parts: Parts) -> LengthPolicy:
        from forerun.lengths.entropy import AdaptiveEntropyStop

        return AdaptiveEntropyStop(self.threshold, self.scale, self.goal, self.step, self.most)


@dataclass(frozen=True)
class SeeingOracle(Drafting):
    """Stops right after the first token that will be rejected: the best that a stop rule can do. Greedy only."""

    name: ClassVar[str] = "seeing-oracle"
    greedy_only: ClassVar[bool] = True

    def policy(self, parts: Parts) -> MismatchStop:
        from forerun.lengths.oracle import MismatchStop, Truth

        return MismatchStop(parts.truth if parts.truth is not None else Truth())


@dataclass(frozen=True)
class Oracle(SeeingOracle):
    """Drafts exactly the tokens that will be accepted: what knowing the length would be worth. Greedy only."""

    name: ClassVar[str] = "oracle"

    def build(self, parts: Parts) -> Drafter:
        from forerun.drafters.oracle import OracleDrafter

        assert parts.draft is not None
        return OracleDrafter(parts.draft, self.policy(parts), parts.target.vocab_size)
