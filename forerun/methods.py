"""The methods by name: settings as frozen dataclasses, checked where they are made.

Importing this needs no torch, so that the command line can refuse a bad setting at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, get_args

if TYPE_CHECKING:
    from forerun.costs import Costs
    from forerun.decode import Drafter
    from forerun.drafters.phrases import PhrasePool
    from forerun.lengths import LengthPolicy
    from forerun.lengths.oracle import Truth
    from forerun.model import CausalLM
    from forerun.nn.pre_verifier import PreVerifier


@dataclass(frozen=True)
class Parts:
    """What a method is built from.

    Attributes:
        target, draft: models with caches of their own; no draft where no method needs one.
        pre_verifier: the trained layer of methods that need one.
        costs: what forwards cost on this machine, for methods that ask.
        truth: what oracles know already; they add what they find out.
        pools: phrases that outlive a call, by their length and their number a token.
    """

    target: CausalLM
    draft: CausalLM | None = None
    pre_verifier: PreVerifier | None = None
    costs: Costs | None = None
    truth: Truth | None = None
    pools: dict[tuple[int, int], PhrasePool] | None = None

    def pool(self, shape: tuple[int, int]) -> PhrasePool | None:
        """The pool of phrases of that length and number a token, None where phrases are not to outlive the call."""
        if self.pools is None:
            return None
        from forerun.drafters.phrases import PhrasePool

        return self.pools.setdefault(shape, PhrasePool(*shape))


class _Settings:
    """What is asked of every method.

    Attributes:
        needs_draft: whether it drafts with a model.
        layer, kind: the trained layer it needs, by the name of the embedded pair's, and what that has to tell (see
            PreVerifierConfig).
        needs_costs: whether it reckons with a table of costs.
        phrases: tokens of a phrase and how many phrases a token has at most, where it drafts by such.
    """

    needs_draft: ClassVar[bool] = False
    layer: ClassVar[str | None] = None
    kind: ClassVar[str | None] = None

    @property
    def needs_costs(self) -> bool:
        return False

    @property
    def phrases(self) -> tuple[int, int] | None:
        return None


class _Drafting(_Settings):
    """A chain drawn from the draft model, as long as the method's policy says."""

    needs_draft: ClassVar[bool] = True

    def policy(self, parts: Parts) -> LengthPolicy:
        raise NotImplementedError

    def build(self, parts: Parts) -> Drafter:
        from forerun.drafters.chain import ChainDrafter

        assert parts.draft is not None
        return ChainDrafter(parts.draft, self.policy(parts), parts.target.vocab_size)


def _at_least(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")


def _between(name: str, value: float, low: float, high: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} must be a number from {low:g} to {high:g}, not {value!r}")


@dataclass(frozen=True)
class AR(_Settings):
    """Plain autoregressive decoding, the baseline."""

    name: ClassVar[str] = "ar"

    def build(self, parts: Parts) -> Drafter:
        from forerun.drafters.plain import PlainDrafter

        return PlainDrafter()


@dataclass(frozen=True)
class SD(_Drafting):
    """Classic speculative decoding: a draft model proposes `gamma` tokens a step."""

    gamma: int = 5
    name: ClassVar[str] = "sd"

    def __post_init__(self) -> None:
        _at_least("gamma", self.gamma, 1)

    def policy(self, parts: Parts) -> LengthPolicy:
        from forerun.lengths import FixedLength

        return FixedLength(self.gamma)


@dataclass(frozen=True)
class Lookup(_Settings):
    """Prompt lookup: proposes up to `gamma` tokens that once followed the last `ngram` or fewer tokens."""

    gamma: int = 8
    ngram: int = 3
    name: ClassVar[str] = "lookup"

    def __post_init__(self) -> None:
        _at_least("gamma", self.gamma, 1)
        _at_least("ngram", self.ngram, 1)

    def build(self, parts: Parts) -> Drafter:
        from forerun.drafters.lookup import LookupDrafter

        return LookupDrafter(self.gamma, self.ngram)


@dataclass(frozen=True)
class Pacer(_Drafting):
    """Drafts blocks of `block` tokens until a trained layer finds that the target will not follow.

    A block of None ("auto") is the size that costs speak for; 4 where a threshold is given.

    Behind the k-th block (from 0) it stops where the `score` of its tokens' survival, their last, mean or min, is
    below `threshold * rho ** k`; a threshold of None ("auto") is the one that costs speak for.
    """

    block: int | None = None
    threshold: float | None = None
    rho: float = 1.0
    score: str = "last"
    most: int = 32
    name: ClassVar[str] = "pacer"
    layer: ClassVar[str | None] = "pre-verifier"
    kind: ClassVar[str | None] = "survival"

    def __post_init__(self) -> None:
        if self.block is not None:
            _at_least("block", self.block, 1)
        if self.threshold is not None:
            _between("threshold", self.threshold, 0, 1)
        _between("rho", self.rho, 0, 10)
        if self.score not in ("last", "mean", "min"):
            raise ValueError(f"score must be last, mean or min, not {self.score!r}")
        _at_least("most", self.most, 1)

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
            self.rho,
            self.score,
            parts.costs,
        )


SOURCES = ("prompt", "output", "rejected", "suffixes")  # of phrases, beside the window


@dataclass(frozen=True)
class _Phrases(_Drafting):
    """Settings of drafting by phrases: a window of `window` columns (0: none), at most `guesses` phrases of `ngram` - 1
    tokens in a draft's forward, and up to `suffixes` of them behind the draft. `sources` are those of phrases, with +
    between them. `warm`: phrases outlive a call."""

    window: int = 0
    guesses: int = 3
    ngram: int = 5
    suffixes: int = 1
    sources: str = "prompt+output+rejected+suffixes"
    warm: bool = True

    def __post_init__(self) -> None:
        _at_least("window", self.window, 0)
        _at_least("guesses", self.guesses, 0)
        _at_least("ngram", self.ngram, 2)
        _at_least("suffixes", self.suffixes, 0)
        for source in filter(None, self.sources.split("+")):
            if source not in SOURCES:
                raise ValueError(f"sources must be of {'+'.join(SOURCES)}, not {source!r}")

    @property
    def phrases(self) -> tuple[int, int]:
        return self.ngram - 1, max(self.guesses, self.suffixes, 1)

    def build(self, parts: Parts) -> Drafter:
        from forerun.drafters.ouroboros import OuroborosDrafter

        assert parts.draft is not None
        return OuroborosDrafter(
            parts.draft,
            lambda: self.policy(parts),
            parts.target.vocab_size,
            width=self.window,
            guesses=self.guesses,
            span=self.ngram - 1,
            suffixes=self.suffixes,
            sources=self.sources.split("+"),
            pool=parts.pool(self.phrases) if self.warm else None,
        )


@dataclass(frozen=True)
class Ouroboros(_Phrases):
    """Drafts `gamma` tokens, several a forward where phrases foresaw them (arXiv 2402.13720)."""

    gamma: int = 10
    name: ClassVar[str] = "ouroboros"

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least("gamma", self.gamma, 1)

    def policy(self, parts: Parts) -> LengthPolicy:
        from forerun.lengths import FixedLength

        return FixedLength(self.gamma)


@dataclass(frozen=True)
class PacerOuroboros(_Phrases, Pacer):
    """Pacer's rule on drafts by phrases. Its costs take it that there are `share` forwards for a drafted token."""

    share: float = 0.5
    name: ClassVar[str] = "pacer-ouroboros"

    def __post_init__(self) -> None:
        _Phrases.__post_init__(self)
        Pacer.__post_init__(self)
        _between("share", self.share, 0, 1)

    def policy(self, parts: Parts) -> LengthPolicy:
        if parts.costs is not None:
            ms = self.share * parts.costs.drafting(1 + self.guesses * (self.ngram - 1))
            parts = replace(parts, costs=replace(parts.costs, draft={1: ms}))
        return Pacer.policy(self, parts)


@dataclass(frozen=True)
class Lookahead(_Settings):
    """Lookahead decoding: the target makes phrases and checks them in its own forwards (arXiv 2402.02057)."""

    window: int = 4
    guesses: int = 4
    ngram: int = 4
    warm: bool = True
    name: ClassVar[str] = "lookahead"

    def __post_init__(self) -> None:
        _at_least("window", self.window, 0)
        _at_least("guesses", self.guesses, 1)
        _at_least("ngram", self.ngram, 2)

    @property
    def phrases(self) -> tuple[int, int]:
        return self.ngram - 1, self.guesses

    def build(self, parts: Parts) -> Drafter:
        from forerun.drafters.lookahead import LookaheadDrafter

        pool = parts.pool(self.phrases) if self.warm else None
        return LookaheadDrafter(self.window, self.guesses, self.ngram - 1, pool)


@dataclass(frozen=True)
class SpecDec(_Drafting):
    """SpecDec++: stops where a trained head finds a rejection among the drafted tokens likelier than `threshold`."""

    threshold: float = 0.3
    most: int = 32
    name: ClassVar[str] = "specdec++"
    layer: ClassVar[str | None] = "specdec++"
    kind: ClassVar[str | None] = "acceptance"

    def __post_init__(self) -> None:
        _between("threshold", self.threshold, 0, 1)
        _at_least("most", self.most, 1)

    def policy(self, parts: Parts) -> LengthPolicy:
        from forerun.lengths.pacer import PacerStop

        assert parts.draft is not None and parts.pre_verifier is not None
        embeddings = parts.draft.model.get_input_embeddings()
        return PacerStop(parts.pre_verifier, embeddings, 1, self.most, 1 - self.threshold)


# In the methods that stop by a rule, `most` is where a draft ends at the latest.
_MOST = 32


@dataclass(frozen=True)
class Heuristic(_Drafting):
    """Transformers' schedule: `gamma` tokens at first, two more where all were accepted, else one fewer."""

    gamma: int = 5
    name: ClassVar[str] = "heuristic"

    def __post_init__(self) -> None:
        _at_least("gamma", self.gamma, 1)

    def policy(self, parts: Parts) -> LengthPolicy:
        from forerun.lengths.schedule import HeuristicSchedule

        return HeuristicSchedule(self.gamma)


@dataclass(frozen=True)
class Confidence(_Drafting):
    """Drafts until a token's own probability falls below `threshold`."""

    threshold: float = 0.4
    most: int = _MOST
    name: ClassVar[str] = "confidence"

    def __post_init__(self) -> None:
        _between("threshold", self.threshold, 0, 1)
        _at_least("most", self.most, 1)

    def policy(self, parts: Parts) -> LengthPolicy:
        from forerun.lengths.confidence import ConfidenceStop

        return ConfidenceStop(self.threshold, self.most)


@dataclass(frozen=True)
class Cumulative(_Drafting):
    """Drafts until the product of the tokens' own probabilities falls below `threshold`."""

    threshold: float = 0.3
    most: int = _MOST
    name: ClassVar[str] = "cumulative"

    def __post_init__(self) -> None:
        _between("threshold", self.threshold, 0, 1)
        _at_least("most", self.most, 1)

    def policy(self, parts: Parts) -> LengthPolicy:
        from forerun.lengths.confidence import CumulativeStop

        return CumulativeStop(self.threshold, self.most)


@dataclass(frozen=True)
class SVIP(_Drafting):
    """Drafts until `1 - sqrt(scale * entropy)` falls below `threshold`; both as in the authors' code."""

    threshold: float = 0.7
    scale: float = 0.15
    most: int = _MOST
    name: ClassVar[str] = "svip"

    def __post_init__(self) -> None:
        _between("threshold", self.threshold, 0, 1)
        _between("scale", self.scale, 0, 100)
        _at_least("most", self.most, 1)

    def policy(self, parts: Parts) -> LengthPolicy:
        from forerun.lengths.entropy import EntropyStop

        return EntropyStop(self.threshold, self.scale, self.most)


@dataclass(frozen=True)
class AdaEDL(_Drafting):
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
        for name in ("threshold", "goal", "step"):
            _between(name, getattr(self, name), 0, 1)
        _between("scale", self.scale, 0, 100)
        _at_least("most", self.most, 1)

    def policy(self, parts: Parts) -> LengthPolicy:
        from forerun.lengths.entropy import AdaptiveEntropyStop

        return AdaptiveEntropyStop(self.threshold, self.scale, self.goal, self.step, self.most)


@dataclass(frozen=True)
class SeeingOracle(_Drafting):
    """Stops right behind the first token that will be rejected: the best that a stop rule can do. Greedy only."""

    name: ClassVar[str] = "seeing-oracle"

    def policy(self, parts: Parts) -> LengthPolicy:
        from forerun.lengths.oracle import MismatchStop, Truth

        return MismatchStop(parts.target, parts.truth if parts.truth is not None else Truth())


@dataclass(frozen=True)
class Oracle(SeeingOracle):
    """Drafts exactly the tokens that will be accepted: what knowing the length would be worth. Greedy only."""

    name: ClassVar[str] = "oracle"

    def build(self, parts: Parts) -> Drafter:
        from forerun.drafters.oracle import OracleDrafter

        assert parts.draft is not None
        return OracleDrafter(parts.draft, self.policy(parts), parts.target.vocab_size)


Method = (
    AR
    | SD
    | Pacer
    | Ouroboros
    | PacerOuroboros
    | Lookahead
    | SpecDec
    | Lookup
    | Heuristic
    | Confidence
    | Cumulative
    | SVIP
    | AdaEDL
    | Oracle
    | SeeingOracle
)
METHODS: dict[str, type[Method]] = {cls.name: cls for cls in get_args(Method)}


def method(name: str | Method, **options: Any) -> Method:
    """The method of that name with these settings; raises ValueError naming what is unknown or out of range."""
    if not isinstance(name, str):
        if options:
            raise ValueError(f"{name!r} already carries its settings; {sorted(options)} cannot be given beside it")
        return name
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; there are {', '.join(METHODS)}")
    known = [field.name for field in fields(METHODS[name])]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"method {name!r} has no setting {unknown[0]!r}; it has {', '.join(known) or 'none'}")
    return METHODS[name](**options)


def parse_value(name: str, key: str, value: str) -> int | float | bool | str | None:
    """A setting from the command line, by the type of its field."""
    kinds = [str(field.type) for field in fields(METHODS[name]) if field.name == key]
    if not kinds:
        method(name, **{key: value})  # says which settings there are
    kind = kinds[0]
    if kind.endswith("| None") and value.lower() in ("auto", "none"):
        return None
    try:
        if kind.startswith("bool"):
            return {"true": True, "1": True, "false": False, "0": False}[value.lower()]
        return int(value) if kind.startswith("int") else float(value) if kind.startswith("float") else value
    except (ValueError, KeyError):
        raise ValueError(f"{name}.{key} must be of type {kind}, not {value!r}") from None


def default_method(has_draft: bool, has_layer: bool = False, options: Iterable[str] = ()) -> str:
    """The method of who names none; settings that only `sd` knows mean that."""
    if has_draft and has_layer and {*options} <= {field.name for field in fields(Pacer)}:
        return Pacer.name
    return "sd" if has_draft else "lookup"
