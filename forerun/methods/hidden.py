"""The methods that draft from the target's hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from forerun.methods.settings import Parts, Settings, at_least, between

if TYPE_CHECKING:
    from forerun.decode import Drafter

REUSE = ("off", "add", "free")


@dataclass(frozen=True)
class Lyanna(Settings):
    """Drafts `depth` hidden states with a trained head (arXiv 2602.21224). For a `width` of 1 their tokens are a chain,
    else the best `nodes` of a tree that is so many beams wide.

    `reuse` of what an earlier step left behind a rejected token: "free" drafts from it alone where it holds `least`
    places or more, "add" gives it `weight` in the fresh draft, "off" drops it.
    """

    depth: int = 4
    width: int = 1
    nodes: int = 8
    reuse: str = "free"
    weight: float = 0.25
    least: int = 2
    name: ClassVar[str] = "lyanna"
    head: ClassVar[str | None] = "lyanna"

    def __post_init__(self) -> None:
        for name in ("depth", "width", "nodes", "least"):
            at_least(name, getattr(self, name), 1)
        between("weight", self.weight, 0, 10)
        if self.reuse not in REUSE:
            raise ValueError(f"reuse must be {', '.join(REUSE[:-1])} or {REUSE[-1]}, not {self.reuse!r}")

    def build(self, parts: Parts) -> Drafter:
        from forerun.drafters.lyanna import LyannaDrafter

        assert parts.head is not None
        return LyannaDrafter(
            parts.head.fresh(), self.depth, self.width, self.nodes, self.reuse, self.weight, self.least
        )
