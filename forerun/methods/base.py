"""The protocol of methods, the parts that drafters are built from, and checked settings."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from collections.abc import Callable

    from forerun.backends.heads import HiddenLM
    from forerun.engine.costs import Costs
    from forerun.engine.step import Drafter
    from forerun.heads.pre_verifier import PreVerifier
    from forerun.methods.pools import Pool
    from forerun.model.causal_lm import CausalLM
    from forerun.text.vocabularies import Translation


@dataclass(frozen=True)
class Parts:
    """The parts that a drafter is built from.

    Attributes:
        target, draft: models, each with its own cache.
        pre_verifier, head: trained layers, for methods that need one.
        costs: the table of costs on this machine.
        pools: {shape: pool of phrases or outputs} (`Method.phrases`); None if nothing may outlive a sequence.
        guarded: wraps a part of a drafter in a guard of its own; None without guards.
        translation: for a draft model with another tokenizer.
    """

    target: CausalLM
    draft: CausalLM | None = None
    pre_verifier: PreVerifier | None = None
    costs: Costs | None = None
    pools: dict[tuple[int, int], Pool] | None = None
    head: HiddenLM | None = None
    guarded: Callable[[Drafter], Drafter] | None = None
    translation: Translation | None = None

    def pool(self, shape: tuple[int, int]) -> Any:
        """Return the pool of a shape, made if need be, or None if nothing may outlive a sequence."""
        from forerun.methods.pools import PhrasePool, SuffixMemory

        made = PhrasePool(*shape) if shape[0] else SuffixMemory(shape[1])
        return None if self.pools is None else self.pools.setdefault(shape, made)


class Method:
    """A method: its settings, as a frozen dataclass, and `build`, which makes the drafter.

    A subclass needs a `name` and `build`. The remaining defaults are for a method without models or layers.

    Attributes:
        name: its name for users and in results.
        needs_draft: whether it drafts with a model.
        layer: the folder's name of the trained layer that it needs.
        head: the kind of head over hidden states that it needs (`forerun.heads.heads.HEAD_KINDS`).
        warm: whether its pool outlives a sequence.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    name: ClassVar[str]
    needs_draft: ClassVar[bool] = False
    layer: ClassVar[str | None] = None
    head: ClassVar[str | None] = None
    warm: bool = False

    def __post_init__(self) -> None:
        for each in fields(self):
            value, allows = getattr(self, each.name), each.metadata.get("allows")
            if (
                allows is not None
                and not allows(value)
                and not (value is None and each.default is None)
            ):
                raise ValueError(f"{each.name} must be {each.metadata['what']}, not {value!r}")

    @property
    def needs_costs(self) -> bool:
        """Return whether it uses a table of costs."""
        return False

    @property
    def any_tokenizer(self) -> bool:
        """Return whether its draft model may have another tokenizer than the target."""
        return not self.needs_draft

    @property
    def phrases(self) -> tuple[int, int] | None:
        """Return the shape of its pool: (tokens of a phrase, most phrases after a token) for phrases, (0, most tokens)
        for earlier outputs, or None without a pool."""
        return None

    def resolve_defaults(self, draft: bool, layer: bool, head: str | None) -> Self:
        """Return the method to use, given whether there is a draft model and its layer, and the kind of the head."""
        return self

    def build(self, parts: Parts) -> Drafter:
        """Return the drafter of an engine."""
        raise NotImplementedError


# Settings are fields of a method, checked when it is made. A setting with a default of None may be None.


def setting(default: Any, allows: Callable[[Any], bool], what: str) -> Any:
    """Return a setting; `what` describes the values that it `allows`."""
    return field(default=default, metadata={"allows": allows, "what": what})


def integer(default: int | None, least: int = 1) -> Any:
    return setting(
        default,
        lambda value: type(value) is int and value >= least,
        f"an integer of at least {least}",
    )


def number(default: float | None, low: float, high: float) -> Any:
    def allows(value: Any) -> bool:
        return (
            isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        )

    return setting(default, allows, f"a number from {low:g} to {high:g}")


def flag(default: bool) -> Any:
    return setting(default, lambda value: isinstance(value, bool), "true or false")


def one_of(default: str, *allowed: str) -> Any:
    return setting(
        default, lambda value: value in allowed, f"{', '.join(allowed[:-1])} or {allowed[-1]}"
    )
