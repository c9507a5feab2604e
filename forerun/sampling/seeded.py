"""Sampling that depends only on a seed, a position and a distribution.

Each token gets the time e / p, where p is its probability and e an exponential random number. The
token with the least time is sampled, which happens with its probability. The numbers e follow from
the seed, the position in the sequence and the token, so draft and target use the same ones. If
their distributions are alike, both sample the same token, and it is accepted. So the target alone
decides what is sampled, whatever was drafted, in whatever steps and beside whatever rows (Daliri et
al., arXiv 2408.07978). The price is that sampled drafts are accepted less often than by the rule of
`forerun.engine.acceptance.accept`. For point masses there is no difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from forerun.failures import NotNumbersError
from forerun.sampling.probabilities import FloatArray

# Only the part of a token's probability above this floor has its own time. The parts below it, of
# all tokens, are added up and have one time together. If that is the smallest, one token is sampled
# by these parts. So the many improbable tokens cost little.
FLOOR = 2.0**-12
_REST = 2**32  # the number of the parts below the floor; those of tokens are smaller

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class SeededSampler:
    """Seeded sampling of the token at one position.

    Attributes:
        key: 64 bits that belong to this position alone.
    """

    key: int

    def uniforms(self, tokens: IntArray) -> FloatArray:
        """Return a number in (0, 1) for each token."""
        # SplitMix64, advanced by token + 1 steps from the key.
        steps = tokens.astype(np.uint64) + np.uint64(1)
        bits = np.uint64(self.key) + steps * np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits = bits ^ (bits >> np.uint64(31))
        return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52

    def sample(self, probabilities: Tensor) -> int:
        """Return the token that is sampled by probabilities [V].

        Raises ValueError if they are NaN or all 0.
        """
        p = probabilities.float().cpu().numpy()
        if not p.sum() > 0.0:
            raise NotNumbersError(
                "no token can be sampled: scores are not numbers, or all of them are -inf"
            )
        ahead = np.flatnonzero(p > FLOOR)
        numbers = self.uniforms(np.append(ahead, _REST))
        low = np.minimum(p, np.float32(FLOOR))
        parts = np.append(p[ahead].astype(np.float64) - FLOOR, low.sum(dtype=np.float64))
        times = -np.log(numbers) / parts
        winner = int(times.argmin())
        return int(ahead[winner]) if winner < len(ahead) else self._sample_low(low)

    def _sample_low(self, low: FloatArray) -> int:
        """Return a token sampled by `low` [V], which need not be normalised.

        Tokens are tried in a random order, which draft and target share, and the first one that is
        accepted is returned.
        """
        start = _REST + 1
        count = 64
        while True:
            numbers = self.uniforms(np.arange(start, start + 2 * count))
            tried = (numbers[::2] * len(low)).astype(np.int64)
            accepted = np.flatnonzero(numbers[1::2] * FLOOR < low[tried])
            if len(accepted):
                return int(tried[accepted[0]])
            start += 2 * count
            count = min(2 * count, 2**16)


@dataclass(frozen=True)
class SeededStream:
    """Seeded sampling of a sequence, by one stream of a seed.

    Streams of neighbouring seeds do not overlap.
    """

    seed: int
    stream: int = 0

    def at(self, position: int) -> SeededSampler:
        """Return the sampler of the token at a position, which counts the prompt's tokens too."""
        numbers = (self.seed, self.stream, position)
        words = b"".join(number.to_bytes(16, "little", signed=True) for number in numbers)
        return SeededSampler(int.from_bytes(blake2b(words, digest_size=8).digest(), "little"))
