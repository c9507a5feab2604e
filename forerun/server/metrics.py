"""What steps add up to: one count, of an answer or of the whole server, and the shapes that clients know it in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest

from forerun.engine.engine import Engine, Step
from forerun.server.schemas import AnswerMetrics, SpeculativeDecoding, Statistics, Timings, TokenDetails, Usage

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


@dataclass
class Counts:
    """Sums over steps.

    tokens = accepted + steps, less what was cut off after an end. steps is the histogram's sum. The mean acceptance
    length is 1 + accepted / steps, the rate accepted / drafted. alpha is another figure: accepted / tested.

    Attributes:
        kept: accepted tokens that stand in the answer: after an end they are cut.
        widest: drafted tokens of the largest draft.
        histogram: index j has how many steps accepted exactly j tokens.
    """

    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    tested: int = 0
    accepted: int = 0
    kept: int = 0
    widest: int = 0
    histogram: Counter[int] = field(default_factory=Counter)

    def add(self, step: Step) -> None:
        self.tokens += len(step.tokens)
        self.steps += 1
        self.drafted += step.drafted
        self.tested += step.tested
        self.accepted += step.accepted
        self.kept += min(step.accepted, len(step.tokens))
        self.widest = max(self.widest, step.drafted)
        self.histogram[step.accepted] += 1

    @property
    def tau(self) -> float:
        return self.tokens / max(1, self.steps)


@dataclass
class AnswerCounts:
    """One answer with all its choices. Times are of a monotonic clock, in seconds.

    Attributes:
        begun, queued: when it was asked for, and when its requests were put into the engine's queue.
        first, decoding, last: when the first tokens were there, when their step began, when the last were there.
        waited: seconds in the queue, of the choice that waited longest.
        gaps: seconds a token, of each step after a choice's first.
    """

    begun: float
    queued: float
    prompt_tokens: int
    counts: Counts = field(default_factory=Counts)
    waited: float = 0.0
    first: float | None = None
    decoding: float = 0.0
    last: float = 0.0
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
        self.counts.add(step)

    @property
    def to_first(self) -> float:
        return 0.0 if self.first is None else self.first - self.begun

    def usage(self) -> Usage:
        counts = self.counts
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=counts.tokens,
            total_tokens=self.prompt_tokens + counts.tokens,
            completion_tokens_details=TokenDetails(
                accepted_prediction_tokens=counts.kept, rejected_prediction_tokens=counts.drafted - counts.accepted
            ),
        )

    def statistics(self) -> Statistics:
        counts, seconds = self.counts, self.last - self.decoding
        between = 0.0 if self.first is None else self.last - self.first
        reading = 0.0 if self.first is None else max(0.0, self.decoding - self.queued - self.waited)
        speculative = SpeculativeDecoding(
            mean_acceptance_length=1 + counts.accepted / max(1, counts.steps),
            draft_acceptance_rate=counts.accepted / max(1, counts.drafted),
            tested_acceptance_rate=counts.accepted / max(1, counts.tested),
            acceptance_histogram=[counts.histogram[j] for j in range(max(counts.histogram, default=0) + 1)],
            num_spec_steps=counts.steps,
            num_draft_tokens=counts.drafted,
            num_tested_draft_tokens=counts.tested,
            num_accepted_draft_tokens=counts.accepted,
            num_spec_tokens=counts.widest,
        )
        metrics = AnswerMetrics(
            time_to_first_token_ms=_ms(self.to_first),
            queue_time_ms=_ms(self.waited),
            generation_time_ms=_ms(seconds),
            mean_itl_ms=_ms(between / max(1, counts.tokens - 1)),
            tokens_per_second=_rate(counts.tokens, seconds),
            speculative_decoding=speculative,
        )
        timings = Timings(
            prompt_n=self.prompt_tokens,
            prompt_ms=_ms(reading),
            prompt_per_second=_rate(self.prompt_tokens, reading),
            predicted_n=counts.tokens,
            predicted_ms=_ms(seconds),
            predicted_per_second=_rate(counts.tokens, seconds),
            draft_n=counts.drafted,
            draft_n_accepted=counts.accepted,
        )
        return Statistics(usage=self.usage(), metrics=metrics, timings=timings)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


def _rate(tokens: int, seconds: float) -> float:
    return round(tokens / seconds, 3) if seconds else 0.0


@dataclass(frozen=True)
class Load:
    """What an engine has to do and to remember now.

    Attributes:
        running, waiting: sequences with a row, and in the queue.
        used, allocated: bytes of keys and values, the latter those that there may be.
        hits: prompt tokens that were not computed again.
    """

    running: int = 0
    waiting: int = 0
    used: int = 0
    allocated: int = 0
    hits: int = 0

    @classmethod
    def of(cls, engine: Engine) -> Load:
        memory = engine.target.memory()
        return cls(
            running=len(engine.running) + engine.prefilling,
            waiting=len(engine.waiting),
            used=memory.used,
            allocated=engine.kv_memory or memory.allocated,
            hits=memory.hits,
        )


class Metrics:
    """Figures for Prometheus, in a registry of the app's own; `load` is asked when they are read."""

    def __init__(self, load: Callable[[], Load]) -> None:
        self.registry, self._load = prometheus.CollectorRegistry(), load
        self._counts = Counts()  # plain numbers, as a server has hundreds of steps a second

        def counter(name: str, text: str, *labels: str) -> prometheus.Counter:
            return prometheus.Counter(f"forerun:{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> prometheus.Histogram:
            return prometheus.Histogram(f"forerun:{name}", text, buckets=buckets, registry=self.registry)

        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.ended = counter("request_success", "Answers that have ended, by how.", "finished_reason")
        self.refused = counter("request_errors", "Requests answered with an error.", "status")
        self.first = histogram("time_to_first_token_seconds", "From a request to its first token.", _SECONDS)
        self.between = histogram("inter_token_latency_seconds", "A step's time divided by its tokens.", _TOKEN)
        self.whole = histogram("e2e_request_latency_seconds", "From a request to its last token.", _SECONDS)
        self.queued = histogram("request_queue_time_seconds", "From a request to its prefill.", _SECONDS)
        self.registry.register(self)  # type: ignore[arg-type]

    def step(self, step: Step, at: float) -> None:
        """Count a step of the engine, whoever reads it."""
        if step.rows:  # else a request was ended without one
            self._counts.add(step)

    def status(self, status: int) -> None:
        """Count a response."""
        if status >= 400:
            self.refused.labels(status=str(status)).inc()

    def answer(self, answer: AnswerCounts, reasons: list[str]) -> None:
        """Count an answer that has ended."""
        for reason in reasons:
            self.ended.labels(finished_reason=reason).inc()
        for gap in answer.gaps:
            self.between.observe(gap)
        if answer.first is not None:
            self.first.observe(answer.to_first)
            self.whole.observe(answer.last - answer.begun)
            self.queued.observe(answer.waited)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        load, counts = self._load(), self._counts
        used = load.used / max(1, load.allocated)
        yield GaugeMetricFamily("forerun:num_requests_running", "Sequences that have a row.", load.running)
        yield GaugeMetricFamily("forerun:num_requests_waiting", "Sequences in the queue.", load.waiting)
        yield GaugeMetricFamily("forerun:kv_cache_usage_perc", "Share of the memory for keys and values in use.", used)
        yield CounterMetricFamily("forerun:prefix_cache_hits", "Prompt tokens that were not computed again.", load.hits)
        yield CounterMetricFamily("forerun:generation_tokens", "Tokens generated.", counts.tokens)
        for space in ("forerun", "vllm"):  # vLLM's names as well: its bench reads them
            for name, text, value in (
                ("num_drafts", "Steps of the target, with and without a draft.", counts.steps),
                ("num_draft_tokens", "Tokens drafted.", counts.drafted),
                ("num_accepted_tokens", "Drafted tokens that the target accepted.", counts.accepted),
            ):
                yield CounterMetricFamily(f"{space}:spec_decode_{name}", text, value)
            name, text = "num_accepted_tokens_per_pos", "Accepted tokens by their position in the draft."
            accepted = CounterMetricFamily(f"{space}:spec_decode_{name}", text, labels=["position"])
            for position in range(max(counts.histogram, default=0)):
                reached = sum(count for j, count in counts.histogram.items() if j > position)
                accepted.add_metric([str(position)], reached)
            yield accepted

    def text(self) -> bytes:
        return generate_latest(self.registry)
