"""What can be measured, under one interface: prompts in, tokens and what they cost out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from forerun.api import Decoder
from forerun.decode import Step
from forerun.metrics import Stats, summarise
from forerun.params import SamplingParams


@dataclass(frozen=True)
class Outcome:
    """What one batch of prompts gave.

    Attributes:
        tokens: output token ids of each row.
        seconds: wall time of the call, prefill included.
        target_forwards, draft_forwards: counted once for each row that took part. Transformers' first forward is the
            prefill and says a token; our prefill says none and is not counted.
        steps: of each row; None where the method keeps no record.
    """

    tokens: list[list[int]]
    seconds: float
    target_forwards: int
    draft_forwards: int
    steps: list[list[Step]] | None = None

    @property
    def stats(self) -> Stats:
        if self.steps is not None:
            return summarise([step for row in self.steps for step in row], self.seconds)
        count = sum(map(len, self.tokens))
        return Stats(count, self.target_forwards, self.draft_forwards, 0, 0, 0, self.seconds, (), ())


# Prompts and their seeds; the third argument is a length for the warm-up, which leaves no state behind but what a guard
# has measured.
Run = Callable[[Sequence[Sequence[int]], Sequence[int], int | None], Outcome]


def decoder_run(decoder: Decoder, params: SamplingParams) -> Run:
    """A method of ours. Row i draws with the first seed + i, so the seeds must count up.

    Phrases of earlier prompts stay, but a prompt that comes again finds none: they would know the answer.
    """
    seen: set[tuple[int, ...]] = set()

    def run(prompts: Sequence[Sequence[int]], seeds: Sequence[int], warm_up: int | None = None) -> Outcome:
        now = set(map(tuple, prompts))
        if now & seen:
            decoder.pools.clear()
            seen.clear()
        seen.update(now)
        asked = replace(params, seed=seeds[0], max_new_tokens=warm_up or params.max_new_tokens)
        begun = perf_counter()
        results = decoder.generate(prompts, asked)
        seconds = perf_counter() - begun
        return Outcome(
            tokens=[result.tokens for result in results],
            seconds=seconds,
            target_forwards=sum(result.stats.target_forwards for result in results),
            draft_forwards=sum(result.stats.draft_forwards for result in results),
            steps=[result.steps for result in results],
        )

    return run
