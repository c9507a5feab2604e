"""Settings of methods that draft with a trained head over the target's hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from forerun.methods.base import Method, integer, number, one_of


@dataclass(frozen=True)
class Heads(Method):
    """Draft up to `depth` places ahead with `width` beams.

    A draft is the tree of the best `nodes` tokens that the beams find, or a chain for a `width` of
    1. Drafted tokens are the most probable ones, for sampled sequences too.
    """

    depth: int = integer(8)
    width: int = integer(1)
    nodes: int = integer(12)


class Paced(Heads):
    """Choose each step's depth and number of nodes by costs and calibration, within the settings.

    `depth` and `nodes` are limits. States are drafted in blocks of `block`.
    """

    block: int

    @property
    def needs_costs(self) -> bool:
        """Return True: depth and nodes follow from costs."""
        return True


@dataclass(frozen=True)
class Lyanna(Heads):
    """Draft `depth` hidden states with a trained head (arXiv 2602.21224).

    With a `width` of 1 the tokens are a chain, else the best `nodes` of a tree of `width` beams (2
    in the paper's Figure 6).

    Old logits are those that an earlier step drafted for places after a rejected token. `reuse`
    says what becomes of them:

    - "add": they are added to the fresh logits, times `weight` (mode A, ours). Their tokens count
      as reused.
    - "both": branches are drafted from them beside the fresh draft, at most `nodes` more, and are
      verified in the same target forward (mode B, the paper's verification fusion).
    - "free": drafts come from them alone, without the head, if at least `least` places are left
      (Figure 6; mode D, or mode C for a `least` of 1). Token information is that of the new tokens,
      from the root on. Greedy sequences do so only if all of a step can, because otherwise the head
      runs anyway.
    - "off": they are dropped.
    """

    reuse: str = one_of("add", "off", "add", "both", "free")
    weight: float = number(0.25, 0, 10)
    least: int = integer(2)
    name: ClassVar[str] = "lyanna"
    head: ClassVar[str | None] = "lyanna"


@dataclass(frozen=True)
class PacerLyanna(Paced, Lyanna):
    """Lyanna with `depth` and `nodes` as limits.

    Each step chooses its depth, in blocks of `block` states, and its number of nodes by the head's
    calibration and the table of costs. The other settings are those of `lyanna`.
    """

    depth: int = integer(16)
    nodes: int = integer(16)
    block: int = integer(4)
    name: ClassVar[str] = "pacer-lyanna"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reuse == "both":
            raise ValueError(
                "pacer-lyanna cannot value a second draft: reuse must be off, add or free, not "
                "'both'"
            )


@dataclass(frozen=True)
class Eagle(Heads):
    """Draft with an EAGLE-like head (arXiv 2401.15077).

    The head runs once for each depth up to `depth`, on all beams. With a `width` of 1 the tokens
    are a chain, else the best `nodes` of a tree of `width` beams.
    """

    name: ClassVar[str] = "eagle"
    head: ClassVar[str | None] = "eagle"


@dataclass(frozen=True)
class PacerEagle(Paced, Eagle):
    """The EAGLE-like head with the rule of `pacer-lyanna`.

    The rule decides every `block` depths whether to go on. The other settings are those of `eagle`,
    of which `depth` and `nodes` are limits.
    """

    depth: int = integer(16)
    nodes: int = integer(16)
    block: int = integer(1)
    name: ClassVar[str] = "pacer-eagle"
