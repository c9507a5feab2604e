"""What an answer's steps add up to, in the shapes of OpenAI, vLLM and llama.cpp."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from forerun.engine import Step


@dataclass
class Tally:
    """Steps of one answer with all its choices. Times are of a monotonic clock, in seconds.

    tokens = accepted + steps, less what was cut off behind an end. steps is the histogram's sum. The mean acceptance
    length is 1 + accepted / steps, the rate accepted / drafted. alpha is another figure: accepted / tested.

    Attributes:
        begun, queued: when it was asked for, and when its requests were put into the engine's queue.
        kept: accepted tokens that stand in the answer: behind an end they are cut.
        histogram: index j has how many steps accepted exactly j tokens.
        first, decoding, last: when the first tokens were there, when their step began, when the last were there.
        waited: seconds in the queue, of the choice that waited longest.
        gaps: seconds a token, of each step behind a choice's first.
    """

    begun: float
    queued: float
    prompt_tokens: int = 0
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    tested: int = 0
    accepted: int = 0
    kept: int = 0
    widest: int = 0
    waited: float = 0.0
    first: float | None = None
    decoding: float | None = None
    last: float | None = None
    histogram: Counter[int] = field(default_factory=Counter)
    gaps: list[float] = field(default_factory=list)
    _latest: dict[int, float] = field(default_factory=dict)

    def add(self, step: Step, at: float) -> None:
        if not step.rows:  # ended without a step
            return
        if self.first is None:
            self.first, self.decoding = at, max(self.queued, at - step.seconds)
        if step.id in self._latest:
            self.gaps.append((at - self._latest[step.id]) / max(1, len(step.tokens)))
        self.last = self._latest[step.id] = at
        self.waited = max(self.waited, step.waited)
        self.tokens += len(step.tokens)
        self.steps += 1
        self.drafted += step.drafted
        self.tested += step.tested
        self.accepted += step.accepted
        self.kept += min(step.accepted, len(step.tokens))
        self.widest = max(self.widest, step.drafted)
        self.histogram[step.accepted] += 1

    @property
    def seconds(self) -> float:
        """From the beginning of the first step to the end of the last."""
        return 0.0 if self.last is None or self.decoding is None else self.last - self.decoding

    @property
    def to_first(self) -> float:
        return 0.0 if self.first is None else self.first - self.begun

    @property
    def total(self) -> float:
        return 0.0 if self.last is None else self.last - self.begun

    @property
    def tau(self) -> float:
        return self.tokens / max(1, self.steps)

    def usage(self) -> dict[str, Any]:
        """OpenAI's."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.tokens,
            "total_tokens": self.prompt_tokens + self.tokens,
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.kept,
                "rejected_prediction_tokens": self.drafted - self.accepted,
            },
        }

    def metrics(self) -> dict[str, Any]:
        """vLLM's, and beside them tested tokens with their rate."""
        between = 0.0 if self.last is None or self.first is None else self.last - self.first
        return {
            "time_to_first_token_ms": _ms(self.to_first),
            "queue_time_ms": _ms(self.waited),
            "generation_time_ms": _ms(self.seconds),
            "mean_itl_ms": _ms(between / max(1, self.tokens - 1)),
            "tokens_per_second": _rate(self.tokens, self.seconds),
            "speculative_decoding": {
                "mean_acceptance_length": 1 + self.accepted / max(1, self.steps),
                "draft_acceptance_rate": self.accepted / max(1, self.drafted),
                "tested_acceptance_rate": self.accepted / max(1, self.tested),
                "acceptance_histogram": [self.histogram[j] for j in range(max(self.histogram, default=0) + 1)],
                "num_spec_steps": self.steps,
                "num_draft_tokens": self.drafted,
                "num_tested_draft_tokens": self.tested,
                "num_accepted_draft_tokens": self.accepted,
                "num_spec_tokens": self.widest,
            },
        }

    def timings(self) -> dict[str, Any]:
        """llama.cpp's."""
        reading = 0.0 if self.decoding is None else max(0.0, self.decoding - self.queued - self.waited)
        return {
            "prompt_n": self.prompt_tokens,
            "prompt_ms": _ms(reading),
            "prompt_per_second": _rate(self.prompt_tokens, reading),
            "predicted_n": self.tokens,
            "predicted_ms": _ms(self.seconds),
            "predicted_per_second": _rate(self.tokens, self.seconds),
            "draft_n": self.drafted,
            "draft_n_accepted": self.accepted,
        }


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


def _rate(tokens: int, seconds: float) -> float:
    return round(tokens / seconds, 3) if seconds else 0.0
