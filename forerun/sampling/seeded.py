"""Sampling that depends only on a seed, a position and a distribution.

Each token gets the time e / p, where p is its probability and e an exponential random number, and
the token with the smallest time is sampled. So each token is sampled with its probability. The
numbers e follow from the seed, the sequence's position and the token, and are the same for draft
and target. If the two distributions are alike, both sample the same token, and it is accepted.
Only the target then decides what is sampled, whatever was drafted, in whatever steps, and beside
whatever rows (Daliri et al., arXiv 2408.07978). The price is that sampled drafts are accepted less
often than by the rule of `forerun.engine.acceptance.accept`; for point masses there is no
difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from torch import Tensor

from forerun.failures import NotNumbersError

# A token has its own time only for its probability above this floor. The probabilities of all
# tokens up to the floor are added up and get one time together; if that is the smallest, one of
# these tokens is chosen. So the many improbable tokens cost little.
FLOOR = 2.0**-12
_REST = 2**32  # stands for all of them; no token has this number


@dataclass(frozen=True)
class SeededSampler:
    """Seeded sampling of the token at one position."""

    key: int  # 64 bits that belong to this position

    def uniforms(self, tokens: np.ndarray) -> np.ndarray:
        """Return a number in (0, 1) for each token."""
        # The output of SplitMix64 that is token + 1 steps behind the key.
        steps = tokens.astype(np.uint64) + np.uint64(1)
        bits = np.uint64(self.key) + steps * np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits = bits ^ (bits >> np.uint64(31))
        return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52

    def sample(self, probabilities: Tensor) -> int:
        """Return the token that is sampled from probabilities [V].

        Raises ValueError if they are NaN or all 0.
        """
        p = probabilities.float().cpu().numpy()
        if not p.sum() > 0.0:
            raise NotNumbersError(
                "no token can be sampled: scores are not numbers, or all of them are -inf"
            )
        above = np.flatnonzero(p > FLOOR)
        numbers = self.uniforms(np.append(above, _REST))
        low = np.minimum(p, np.float32(FLOOR))
        masses = np.append(p[above].astype(np.float64) - FLOOR, low.sum(dtype=np.float64))
        winner = int((-np.log(numbers) / masses).argmin())
        return int(above[winner]) if winner < len(above) else self._sample_low(low)

    def _sample_low(self, low: np.ndarray) -> int:
        """Return a token with the probabilities of `low`, which are at most FLOOR each.

        Tokens are proposed in a random order, and the first one that is accepted is returned. The
        order is the same for draft and target.
        """
        start = _REST + 1
        count = 64
        while True:
            numbers = self.uniforms(np.arange(start, start + 2 * count))
            tokens = (numbers[::2] * len(low)).astype(np.int64)
            hits = np.flatnonzero(numbers[1::2] * FLOOR < low[tokens])
            if len(hits):
                return int(tokens[hits[0]])
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
        words = b"".join(
            number.to_bytes(16, "little", signed=True)
            for number in (self.seed, self.stream, position)
        )
        return SeededSampler(int.from_bytes(blake2b(words, digest_size=8).digest(), "little"))
