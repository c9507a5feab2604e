"""Sampling that depends on a seed, a position and a distribution, and on nothing else.

Each token gets the time e / p, where e is exponential and p its probability, and the token with the least time is
sampled. So each is sampled with its probability. The numbers e follow from the seed, the sequence's position and the
token, the same for draft and target: if their distributions are alike, both sample the same token, and it is accepted.
What is sampled is then the target's choice alone, whatever was drafted, in whatever steps and beside whatever rows
(Daliri et al., arXiv 2408.07978). The price is that sampled drafts are accepted less often than by the rule of
`forerun.engine.acceptance.accept`; for point masses there is no difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from torch import Tensor

from forerun.failures import NotNumbersError

# Probability beyond this gets a time of its own. What all tokens have up to it gets one time together, and chooses
# among them if that is the least: so the many improbable tokens cost little.
FLOOR = 2.0**-12
_REST = 2**32  # the first number of no token


@dataclass(frozen=True)
class SeededSampler:
    """Seeded sampling of the token at one position."""

    key: int  # 64 bits of this position alone

    def uniforms(self, tokens: np.ndarray) -> np.ndarray:
        """Return a number in (0, 1) for each token."""
        # SplitMix64: its steps are those of the token's number.
        bits = np.uint64(self.key) + (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits = bits ^ (bits >> np.uint64(31))
        return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52

    def sample(self, probabilities: Tensor) -> int:
        """Return the index of the sampled one of probabilities [V]. Raises ValueError if they are NaN or all 0."""
        p = probabilities.float().cpu().numpy()
        if not p.sum() > 0.0:
            raise NotNumbersError(
                "no token can be sampled: scores are not numbers, or all of them are -inf"
            )
        ahead = np.flatnonzero(p > FLOOR)
        numbers = self.uniforms(np.append(ahead, _REST))
        low = np.minimum(p, np.float32(FLOOR))
        times = -np.log(numbers) / np.append(
            p[ahead].astype(np.float64) - FLOOR, low.sum(dtype=np.float64)
        )
        winner = int(times.argmin())
        return int(ahead[winner]) if winner < len(ahead) else self._among(low)

    def _among(self, low: np.ndarray) -> int:
        """Return an index with the probabilities of `low`, not normalised: that of the first token accepted in a random
        order, which is the same for draft and target."""
        start, count = _REST + 1, 64
        while True:
            numbers = self.uniforms(np.arange(start, start + 2 * count))
            found = (numbers[::2] * len(low)).astype(np.int64)
            hits = np.flatnonzero(numbers[1::2] * FLOOR < low[found])
            if len(hits):
                return int(found[hits[0]])
            start, count = start + 2 * count, min(2 * count, 2**16)


@dataclass(frozen=True)
class SeededStream:
    """Seeded sampling of a sequence, by one stream of a seed. Streams of neighbouring seeds do not overlap."""

    seed: int
    stream: int = 0

    def at(self, position: int) -> SeededSampler:
        """Return the sampler of the token at a position, the prompt's tokens counted."""
        words = b"".join(
            number.to_bytes(16, "little", signed=True)
            for number in (self.seed, self.stream, position)
        )
        return SeededSampler(int.from_bytes(blake2b(words, digest_size=8).digest(), "little"))
