"""Sampling that depends on a seed, a place and a distribution, and on nothing else.

Each token runs a race: it needs the time e / p, where e is exponential and p its probability, and the fastest one wins.
So every token wins with its probability. The numbers e follow from the seed, the sequence's position and the token.
Draft and target hold the same races: where their distributions are alike, the same token wins, and is accepted if so.
What is sampled is then the target's choice alone, whatever was drafted, in whatever steps and beside whatever others
(Daliri et al., arXiv 2408.07978). The price is that sampled drafts are accepted less often than by the rule of
`forerun.sampling.accept`; for point masses there is no difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from torch import Tensor

# Tokens that are less probable than this run as one, which chooses among them if it wins: they are many.
FLOOR = 2.0**-12
_REST, _CHOICE = 2**32, 2**32 + 1  # numbers of no token


@dataclass(frozen=True)
class Race:
    """The races of one position. `key`: 64 bits that belong to it alone."""

    key: int

    def uniforms(self, tokens: np.ndarray) -> np.ndarray:
        """A number in (0, 1) for each token."""
        # SplitMix64: its steps are those of the token's number.
        bits = np.uint64(self.key) + (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits = bits ^ (bits >> np.uint64(31))
        return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52

    def sample(self, probabilities: Tensor) -> int:
        """The winner among tokens with these probabilities [V]. Raises ValueError for a distribution of NaN or of
        nothing."""
        p = probabilities.float().cpu().numpy()
        ahead = np.flatnonzero(p >= FLOOR)
        own, whole = p[ahead], p.sum()
        mass = whole - own.sum()  # of the rest; where there is none, rounding
        if not whole > 0.0:
            raise ValueError("no token can be sampled: the model's scores are not numbers, or all of them are -inf")
        numbers = self.uniforms(np.append(ahead, _REST))
        times = -np.log(numbers[:-1]) / own
        best = int(times.argmin()) if len(ahead) else -1
        if best >= 0 and (mass <= 0.0 or times[best] <= -np.log(numbers[-1]) / mass):
            return int(ahead[best])
        rest = np.where(p < FLOOR, p, 0.0).cumsum(dtype=np.float64)
        if not rest[-1] > 0.0:
            return int(ahead[best])
        at = self.uniforms(np.array([_CHOICE]))[0] * rest[-1]
        return int(min(rest.searchsorted(at, "right"), len(rest) - 1))


@dataclass(frozen=True)
class Races:
    """The races of a sequence: those of one stream of a seed. Streams of neighbouring seeds have nothing in common."""

    seed: int
    stream: int = 0

    def at(self, position: int) -> Race:
        """Those of the token at a position, the prompt's tokens counted."""
        words = b"".join(number.to_bytes(16, "little", signed=True) for number in (self.seed, self.stream, position))
        return Race(int.from_bytes(blake2b(words, digest_size=8).digest(), "little"))
