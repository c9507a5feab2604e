"""Build the drafter of a method: its source of drafts, with its rule for their length.

`forerun.methods` imports this module when the first drafter is built (`methods.base.build_module`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from forerun.drafters.eagle import EagleDrafter
from forerun.drafters.hybrid import hybrid_drafter
from forerun.drafters.lyanna import LyannaDrafter
from forerun.drafters.model_chain import ChainDrafter
from forerun.drafters.pacer import PacerStop
from forerun.drafters.phrases import OuroborosDrafter, costs_by_phrases
from forerun.drafters.plain import PlainDrafter
from forerun.drafters.pools import PhrasePool, Pool, SuffixMemory
from forerun.drafters.suffix import SuffixDrafter
from forerun.drafters.translated import TranslatedDrafter
from forerun.engine.step import Drafter
from forerun.methods import (
    AR,
    SD,
    Confidence,
    Cumulative,
    Drafting,
    Eagle,
    Hybrid,
    Lyanna,
    Method,
    Ouroboros,
    Pacer,
    PacerOuroboros,
    Parts,
    Suffix,
)
from forerun.methods.phrases import Phrases
from forerun.planning.stop_rules import BestLength, Bounded, Bounds, FixedLength, LengthPolicy

GAMMA_WITHOUT_COSTS = 5  # tokens of a draft of `sd` if no costs are known


def drafter_of(method: Method, parts: Parts) -> Drafter:
    """Return a method's drafter."""
    drafter: Drafter = _entry(SOURCES, method, "build")(method, parts)
    return drafter


def policy_of(method: Drafting, parts: Parts) -> LengthPolicy:
    """Return the length policy of a method that drafts with a draft model."""
    policy: LengthPolicy = _entry(LENGTHS, method, "policy")(method, parts)
    return policy


def pool_of(shape: tuple[int, int]) -> Pool:
    """Return a new pool of a shape (`Method.phrases`)."""
    return PhrasePool(*shape) if shape[0] else SuffixMemory(shape[1])


def _entry(
    table: Mapping[type[Method], Callable[..., Any]], method: Method, missing: str
) -> Callable[..., Any]:
    """Return a table's entry for the class of a method, or for the nearest class above it."""
    for cls in type(method).__mro__:
        if cls in table:
            return table[cls]
    raise NotImplementedError(f"{type(method).__name__} must implement {missing}")


# Sources of drafts.


def _plain(method: AR, parts: Parts) -> Drafter:
    return PlainDrafter()


def _model_chain(method: Drafting, parts: Parts) -> Drafter:
    assert parts.draft is not None
    policy = method.policy(parts)
    vocab_size = parts.target.vocab_size
    if parts.translation is None:
        return ChainDrafter(parts.draft, policy, vocab_size, parts.present_costs)
    assert method.any_tokenizer
    return TranslatedDrafter(
        parts.translation, parts.draft, policy, vocab_size, parts.present_costs
    )


def _phrases(method: Phrases, parts: Parts) -> Drafter:
    assert parts.draft is not None
    pool = parts.pool(method.phrases) if method.warm else None
    policy = method.policy(parts)
    return OuroborosDrafter(method, parts.draft, policy, parts.target.vocab_size, pool, parts.costs)


def _suffixes(method: Suffix, parts: Parts) -> SuffixDrafter:
    memory = parts.pool(method.phrases) if method.warm else None
    return SuffixDrafter(method, memory, parts.present_costs)


def _hybrid(method: Hybrid, parts: Parts) -> Drafter:
    return hybrid_drafter(method, _suffixes(method, parts), parts)


def _lyanna(method: Lyanna, parts: Parts) -> Drafter:
    assert parts.head is not None
    return LyannaDrafter(method, parts.head.fresh(), parts.present_costs)


def _eagle(method: Eagle, parts: Parts) -> Drafter:
    assert parts.head is not None
    return EagleDrafter(method, parts.head.fresh(), parts.present_costs, method.width)


SOURCES: dict[type[Method], Callable[..., Drafter]] = {
    AR: _plain,
    Drafting: _model_chain,
    Phrases: _phrases,
    Suffix: _suffixes,
    Hybrid: _hybrid,
    Lyanna: _lyanna,
    Eagle: _eagle,
}


# Rules for the length of a draft model's chains. Other sources have their own.


def _best_or_fixed(method: SD, parts: Parts) -> LengthPolicy:
    costs = parts.present_costs
    if method.gamma is None and costs is not None:
        return BestLength(costs)
    return FixedLength(method.gamma or GAMMA_WITHOUT_COSTS)


def _fixed(method: Ouroboros, parts: Parts) -> LengthPolicy:
    return FixedLength(method.gamma)


def _confidence(method: Confidence, parts: Parts) -> LengthPolicy:
    return Bounded(Bounds(method.most, min_probability=method.threshold))


def _cumulative(method: Cumulative, parts: Parts) -> LengthPolicy:
    return Bounded(Bounds(method.most, min_product=method.threshold, floor=method.floor))


def _pacer(method: Pacer, parts: Parts) -> LengthPolicy:
    assert parts.pre_verifier is not None
    costs = parts.costs
    if costs is not None and isinstance(method, PacerOuroboros):
        costs = costs_by_phrases(method, costs)
    return PacerStop(parts.pre_verifier, method.block, method.most, method.threshold, costs)


LENGTHS: dict[type[Method], Callable[..., LengthPolicy]] = {
    SD: _best_or_fixed,
    Ouroboros: _fixed,
    Confidence: _confidence,
    Cumulative: _cumulative,
    Pacer: _pacer,
}
