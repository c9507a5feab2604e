"""SpecDec++ (arXiv 2405.19715): a head over the draft's states says how likely each token's rejection is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from forerun.engine.sequence import Mode
from forerun.heads.quick import Array
from forerun.methods import Parts
from forerun.methods.base import integer, number
from forerun.methods.chain import Drafting
from forerun.methods.pacer import BlockRule, PacerStop
from forerun.methods.stop import LengthPolicy, StopRule


@dataclass(frozen=True)
class SpecDec(Drafting):
    """SpecDec++: stops where a trained head finds a rejected token in the draft more probable than `threshold`."""

    threshold: float = number(0.3, 0, 1)
    most: int = integer(32)
    name: ClassVar[str] = "specdec++"
    layer: ClassVar[str | None] = "specdec++"
    kind: ClassVar[str | None] = "acceptance"

    def policy(self, parts: Parts) -> LengthPolicy:
        assert parts.pre_verifier is not None
        return SpecDecStop(parts.pre_verifier, 1, self.most, 1 - self.threshold)


class SpecDecStop(PacerStop):
    """Stops where the product of the tokens' probabilities of acceptance is below the threshold."""

    def _rule(self, mode: Mode, count: int, is_alone: bool) -> StopRule:
        assert self.threshold is not None
        return AcceptanceRule(self, 1, self.threshold, 1)


class AcceptanceRule(BlockRule):
    """The layer's logits are those of a token's acceptance if the tokens before it were accepted."""

    def __init__(self, policy: PacerStop, block: int, threshold: float, together: int) -> None:
        super().__init__(policy, block, threshold, together)
        self.survival: dict[int, float] = {}

    def _judged(self, output: Array) -> list[bool]:
        for id, logits in zip(self.ids, output, strict=True):
            self.survival[id] = self.survival.get(id, 1.0) * float((1 / (1 + np.exp(-logits))).prod())
        return [self.survival[id] >= self.threshold for id in self.ids]
