"""What a method is: checked settings, and the parts that its drafter is built from.

Nothing here imports torch, so that the command line refuses a bad setting at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from collections.abc import Callable

    from forerun.backends.heads import HiddenLM
    from forerun.engine.step import Drafter
    from forerun.heads.pre_verifier import PreVerifier
    from forerun.model.causal_lm import CausalLM
    from forerun.planning.corrected_costs import CorrectedCosts
    from forerun.planning.cost_model import Costs, CostSource
    from forerun.text.vocabularies import Translation


def build_module() -> ModuleType:
    """Return `forerun.drafters.build`, which is imported when the first drafter is built.

    This is the only late import of what runs. Drafters import torch, which takes seconds, and
    settings are checked before that.
    """
    return import_module("forerun.drafters.build")


@dataclass(frozen=True)
class Parts:
    """The parts that a drafter is built from.

    Attributes:
        target, draft: models, each with its own cache.
        pre_verifier, head: trained layers, for methods that need one.
        costs: the table of costs on this machine, as it was measured.
        corrected: the same as steps correct it; None if no step does.
        pools: {shape: pool of phrases or of outputs} (`Method.phrases`), or None if nothing may
            outlive a sequence.
        guarded: wraps a part of a drafter in a guard for that part alone; None without guards.
        translation: for a draft model with another tokenizer.
    """

    target: CausalLM
    draft: CausalLM | None = None
    pre_verifier: PreVerifier | None = None
    costs: Costs | None = None
    pools: dict[tuple[int, int], Any] | None = None
    head: HiddenLM | None = None
    guarded: Callable[[Drafter], Drafter] | None = None
    translation: Translation | None = None
    corrected: CorrectedCosts | None = None

    @property
    def present_costs(self) -> CostSource | None:
        """What gives the table of costs as it is known at present."""
        return self.corrected if self.corrected is not None else self.costs

    def pool(self, shape: tuple[int, int]) -> Any:
        """Return the pool of a shape, or None if nothing may outlive a sequence.

        A pool is made when it is first asked for.
        """
        if self.pools is None:
            return None
        if shape not in self.pools:
            self.pools[shape] = build_module().pool_of(shape)
        return self.pools[shape]


class Method:
    """A method: its settings, as a frozen dataclass, and `build`, which makes the drafter.

    A subclass needs a `name`, and outside the package also `build`. All else has a default, which
    suits a method without a draft model, layer or head.

    Attributes:
        name: its name for users and in results.
        needs_draft: whether it drafts with a model.
        layer: the name of the trained layer that it needs, if any: "pre-verifier".
        head: the kind of head over hidden states that it needs, if any
            (`forerun.heads.heads.HEAD_KINDS`).
        warm: whether its pool outlives a sequence.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    name: ClassVar[str]
    needs_draft: ClassVar[bool] = False
    layer: ClassVar[str | None] = None
    head: ClassVar[str | None] = None
    warm: bool = False

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if value is None and option.default is None:
                continue
            allows = option.metadata.get("allows")
            if allows is not None and not allows(value):
                raise ValueError(f"{option.name} must be {option.metadata['what']}, not {value!r}")

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
        """Return the shape of its pool, or None without a pool.

        The shape is (tokens of a phrase, most phrases after a token) for phrases, and (0, most
        tokens) for earlier outputs.
        """
        return None

    def resolve_defaults(self, draft: bool, layer: bool, head: str | None) -> Self:
        """Return the method with settings chosen by what is available, where they are "auto".

        Args:
            draft: whether there is a draft model.
            layer: whether there is a trained layer for it.
            head: the kind of the head; None without one.
        """
        return self

    def build(self, parts: Parts) -> Drafter:
        """Return the drafter of an engine."""
        drafter: Drafter = build_module().drafter_of(self, parts)
        return drafter


# Settings are fields of a method, checked when it is made. One whose default is None may be None.


def setting(default: Any, allows: Callable[[Any], bool], what: str) -> Any:
    """Return a setting; `what` describes the values that it `allows`."""
    return field(default=default, metadata={"allows": allows, "what": what})


def integer(default: int | None, least: int = 1) -> Any:
    """Return a setting for an integer of at least `least`."""
    return setting(
        default,
        lambda value: type(value) is int and value >= least,
        f"an integer of at least {least}",
    )


def number(default: float | None, low: float, high: float) -> Any:
    """Return a setting for a number from `low` to `high`."""

    def allows(value: Any) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and low <= value <= high

    return setting(default, allows, f"a number from {low:g} to {high:g}")


def flag(default: bool) -> Any:
    """Return a setting that is true or false."""
    return setting(default, lambda value: isinstance(value, bool), "true or false")


def one_of(default: str, *allowed: str) -> Any:
    """Return a setting for one of several words."""
    words = f"{', '.join(allowed[:-1])} or {allowed[-1]}"
    return setting(default, lambda value: value in allowed, words)
