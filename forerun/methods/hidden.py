"""The methods that draft from the target's hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from forerun.costs import Costs
from forerun.methods.settings import Parts, Sampling, at_least, between

if TYPE_CHECKING:
    from collections.abc import Callable

    from forerun.engine import Drafter
    from forerun.generation import Mode

# Those of the embedded target, for where none were measured.
USUAL = Costs({1: 3.9, 8: 5.8, 32: 10.6}, {}, head={1: 0.4, 16: 0.8})
REUSE = ("off", "add", "both", "free")


@dataclass(frozen=True)
class Heads(Sampling):
    """What methods with a head have in common: up to `depth` places ahead, `width` beams, the best `nodes` tokens of
    what they find; for a `width` of 1 a chain.

    With `sampled`, the tokens of chains of sampled sequences are drawn as the target's are. Otherwise they are the most
    probable ones.
    """

    depth: int = 8
    width: int = 1
    nodes: int = 12
    sampled: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.sampled, bool):
            raise ValueError(f"sampled must be true or false, not {self.sampled!r}")
        for name in ("depth", "width", "nodes"):
            at_least(name, getattr(self, name), 1)
        if self.sampled and self.width > 1:
            raise ValueError(f"sampled is for chains: width must be 1, not {self.width}")
        if self.sampled and isinstance(self, Paced):
            # A token that was drawn and looked at must be sent.
            raise ValueError("this method takes drafted tokens back where they do not pay, so sampled must be false")

    @property
    def drawing(self) -> str | None:
        """How chains that were sampled are verified, None where all tokens are the most probable ones."""
        return self.verification if self.sampled else None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Depth, width, and nodes at most."""
        return self.depth, self.width, self.nodes if self.width > 1 else self.depth

    def costs_for(self, parts: Parts) -> Callable[[Mode], Costs] | None:
        """The costs by mode that it chooses its drafts by, if any."""
        return None

    @property
    def steps(self) -> int:
        """How many states it makes before it asks whether to make more, where it asks."""
        return self.depth


class Paced:
    """What methods have in common that choose each step's depth and number of nodes by costs and calibration."""

    block: int

    @property
    def steps(self) -> int:
        return self.block

    @property
    def needs_costs(self) -> bool:
        return True

    def costs_for(self, parts: Parts) -> Callable[[Mode], Costs]:
        def costs(mode: Mode) -> Costs:
            known = parts.costs
            return known if known is not None and known.head else USUAL

        return costs


@dataclass(frozen=True)
class Lyanna(Heads):
    """Drafts `depth` hidden states with a trained head (arXiv 2602.21224). For a `width` of 1 their tokens are a chain,
    else the best `nodes` of a tree that is so many beams wide.

    `reuse` of what an earlier step left behind a rejected token: "add" gives it `weight` in the fresh draft, "both"
    drafts from it beside the fresh draft, "free" drafts from it alone, without the head, where it holds `least` places
    or more (the paper's Figure 6), "off" drops it. The figure's tree has a `width` of 2: the best children of all beams
    go on, others end as leaves.
    """

    reuse: str = "add"
    weight: float = 0.25
    least: int = 2
    name: ClassVar[str] = "lyanna"
    head: ClassVar[str | None] = "lyanna"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("least", self.least, 1)
        between("weight", self.weight, 0, 10)
        if self.reuse not in REUSE:
            raise ValueError(f"reuse must be {', '.join(REUSE[:-1])} or {REUSE[-1]}, not {self.reuse!r}")

    def build(self, parts: Parts) -> Drafter:
        from forerun.drafters.lyanna import LyannaDrafter

        assert parts.head is not None
        return LyannaDrafter(
            parts.head.fresh(),
            *self.shape,
            self.reuse,
            self.weight,
            self.least,
            self.costs_for(parts),
            self.steps,
            self.drawing,
        )


@dataclass(frozen=True)
class PacerLyanna(Paced, Lyanna):
    """Lyanna, `depth` and `nodes` being limits: each step goes as deep, in blocks of `block` states, and takes as many
    tokens as its most probable paths are worth, by the head's calibration and what forwards cost here."""

    depth: int = 16
    nodes: int = 16
    block: int = 4
    name: ClassVar[str] = "pacer-lyanna"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("block", self.block, 1)
        if self.reuse == "both":
            raise ValueError(
                "pacer-lyanna knows no value of a second draft: reuse must be off, add or free, not 'both'"
            )


@dataclass(frozen=True)
class Eagle(Heads):
    """Drafts with an EAGLE-like head (arXiv 2401.15077), which is given the token behind each state."""

    name: ClassVar[str] = "eagle"
    head: ClassVar[str | None] = "eagle"

    def build(self, parts: Parts) -> Drafter:
        from forerun.drafters.heads import EagleDrafter

        assert parts.head is not None
        return EagleDrafter(parts.head.fresh(), *self.shape, self.costs_for(parts), self.steps, self.drawing)


@dataclass(frozen=True)
class PacerEagle(Paced, Eagle):
    """The EAGLE-like head with the rule of `pacer-lyanna`: `depth` and `nodes` are limits, and each step goes as deep
    and takes as many tokens as they are worth. It asks every `block` depths, each of which is a forward of the head."""

    depth: int = 16
    nodes: int = 16
    block: int = 1
    name: ClassVar[str] = "pacer-eagle"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("block", self.block, 1)


@dataclass(frozen=True)
class Medusa(Heads):
    """Drafts with a Medusa-like head (arXiv 2401.10774): a block for each place ahead, none of which knows the tokens
    of the others. It is as deep as it was trained to be, at most."""

    name: ClassVar[str] = "medusa"
    head: ClassVar[str | None] = "medusa"

    def build(self, parts: Parts) -> Drafter:
        from forerun.drafters.heads import MedusaDrafter

        assert parts.head is not None
        return MedusaDrafter(parts.head.fresh(), *self.shape, self.drawing)
