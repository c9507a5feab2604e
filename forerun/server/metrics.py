"""Counts of steps: as JSON in the shapes that clients know, and as metrics for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from starlette.types import Scope

from forerun.engine.engine import Step
from forerun.engine.target import Memory
from forerun.server.worker import Worker

# Upper bounds of histogram buckets, in seconds.
_REQUEST_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)

Family = GaugeMetricFamily | CounterMetricFamily


@dataclass(kw_only=True)
class Counts:
    """Sums over steps.

    `tokens` is `accepted` + `steps`, less the tokens that were cut off after an end.

    Attributes:
        kept: accepted tokens that are part of the answer; those after an end are not.
        longest_draft: the number of tokens of the largest draft.
        histogram: index j counts the steps that accepted exactly j tokens.
    """

    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    tested: int = 0
    accepted: int = 0
    kept: int = 0
    longest_draft: int = 0
    histogram: Counter[int] = field(default_factory=Counter)

    def count(self, step: Step) -> None:
        """Add a step."""
        self.tokens += len(step.tokens)
        self.steps += 1
        self.drafted += step.drafted
        self.tested += step.tested
        self.accepted += step.accepted
        self.kept += min(step.accepted, len(step.tokens))
        self.longest_draft = max(self.longest_draft, step.drafted)
        self.histogram[step.accepted] += 1

    @property
    def tau(self) -> float:
        """The tokens per step."""
        return self.tokens / max(1, self.steps)


@dataclass(kw_only=True)
class AnswerCounts(Counts):
    """Sums over the steps of one answer, with all its choices.

    Times are seconds of a monotonic clock.

    Attributes:
        started_at: when the request came.
        queued_at: when it was put into the engine's queue.
        decoding_at: when the step began that gave the first tokens.
        first_at: when the first tokens came, or None before that.
        last_at: when the last tokens came.
        waited: seconds in the queue, of the choice that waited longest.
        gaps: for each step after a choice's first, the seconds per token.
        has_prediction: whether the client sent a text as its prediction of the answer. It is not
            used, so that its figures are 0.
        reasoning_tokens: how many of the tokens are thoughts, their marks included.
        calls: how many tool calls could be read and how many could not; empty without tools.
    """

    started_at: float
    queued_at: float
    prompt_tokens: int
    has_prediction: bool = False
    reasoning_tokens: int = 0
    waited: float = 0.0
    first_at: float | None = None
    decoding_at: float = 0.0
    last_at: float = 0.0
    gaps: list[float] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    _latest: dict[int, float] = field(default_factory=dict)  # when each choice had its last step

    def add(self, choice: int, step: Step, at: float) -> None:
        """Count a step of a choice that came at the time `at`."""
        if not step.rows:  # the request ended without a step of the target
            return
        if self.first_at is None:
            self.first_at = at
            self.decoding_at = max(self.queued_at, at - step.seconds)
        if choice in self._latest:
            self.gaps.append((at - self._latest[choice]) / max(1, len(step.tokens)))
        self._latest[choice] = at
        self.last_at = at
        self.waited = max(self.waited, step.waited)
        self.count(step)

    @property
    def to_first(self) -> float:
        """The seconds from the request to its first tokens; 0 before they have come."""
        return 0.0 if self.first_at is None else self.first_at - self.started_at

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's `usage`."""
        accepted = self.kept
        rejected = self.drafted - self.accepted
        if self.has_prediction:
            accepted = 0
            rejected = 0
        details = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
        }
        if self.reasoning_tokens:
            details["reasoning_tokens"] = self.reasoning_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.tokens,
            "total_tokens": self.prompt_tokens + self.tokens,
            "completion_tokens_details": details,
        }

    def statistics(self) -> dict[str, Any]:
        """Return vLLM's `metrics` and llama.cpp's `timings`."""
        seconds = self.last_at - self.decoding_at
        after_first = 0.0
        prefill = 0.0
        if self.first_at is not None:
            after_first = self.last_at - self.first_at
            prefill = max(0.0, self.decoding_at - self.queued_at - self.waited)
        return {
            "metrics": {
                **self.calls,
                "time_to_first_token_ms": _ms(self.to_first),
                "queue_time_ms": _ms(self.waited),
                "generation_time_ms": _ms(seconds),
                "mean_itl_ms": _ms(after_first / max(1, self.tokens - 1)),
                "tokens_per_second": _rate(self.tokens, seconds),
                "speculative_decoding": self._speculative_decoding(),
            },
            "timings": {
                "prompt_n": self.prompt_tokens,
                "prompt_ms": _ms(prefill),
                "prompt_per_second": _rate(self.prompt_tokens, prefill),
                "predicted_n": self.tokens,
                "predicted_ms": _ms(seconds),
                "predicted_per_second": _rate(self.tokens, seconds),
                "draft_n": self.drafted,
                "draft_n_accepted": self.accepted,
            },
        }

    def _speculative_decoding(self) -> dict[str, Any]:
        """Return vLLM's statistics of drafts, and our alpha beside its acceptance rate."""
        lengths = range(max(self.histogram, default=0) + 1)
        return {
            "mean_acceptance_length": 1 + self.accepted / max(1, self.steps),
            "draft_acceptance_rate": self.accepted / max(1, self.drafted),
            "tested_acceptance_rate": self.accepted / max(1, self.tested),
            "acceptance_histogram": [self.histogram[length] for length in lengths],
            "num_spec_steps": self.steps,
            "num_draft_tokens": self.drafted,
            "num_tested_draft_tokens": self.tested,
            "num_accepted_draft_tokens": self.accepted,
            "num_spec_tokens": self.longest_draft,
        }


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


def _rate(tokens: int, seconds: float) -> float:
    return round(tokens / seconds, 3) if seconds else 0.0


class Metrics:
    """The server's metrics for Prometheus, in a registry of the app.

    Counts of steps are kept as plain numbers, because a server makes hundreds of steps a second.
    They, and the state of the engine, become metrics when Prometheus reads them (`collect`).
    """

    def __init__(self, worker: Worker) -> None:
        self.registry = prometheus.CollectorRegistry()
        self._worker = worker
        self._counts = Counts()

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> prometheus.Histogram:
            return prometheus.Histogram(
                f"forerun:{name}", text, buckets=buckets, registry=self.registry
            )

        def counter(name: str, text: str, *labels: str) -> prometheus.Counter:
            return prometheus.Counter(f"forerun:{name}", text, labels, registry=self.registry)

        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self._ended = counter(
            "request_success", "Choices that have ended, by finish reason.", "finished_reason"
        )
        self._calls = {
            "tool_calls": counter("tool_calls", "Tool calls in answers."),
            "unparsed_tool_calls": counter(
                "unparsed_tool_calls", "Tool calls that could not be read and stayed text."
            ),
        }
        self._refused = counter("request_errors", "Requests answered with an error.", "status")
        self._first = histogram(
            "time_to_first_token_seconds", "From a request to its first token.", _REQUEST_BUCKETS
        )
        self._per_token = histogram(
            "inter_token_latency_seconds", "A step's time divided by its tokens.", _TOKEN_BUCKETS
        )
        self._total = histogram(
            "e2e_request_latency_seconds", "From a request to its last token.", _REQUEST_BUCKETS
        )
        self._queued = histogram(
            "request_queue_time_seconds", "From a request to its prefill.", _REQUEST_BUCKETS
        )
        self.registry.register(self)

    def count_step(self, step: Step, at: float) -> None:
        """Count a step of the engine, whether or not its client is still connected."""
        if step.rows:  # otherwise a request ended without a step of the target
            self._counts.count(step)

    def count_status(self, scope: Scope, status: int) -> None:
        """Count the response to a request by its status, if it is an error."""
        if status >= 400:
            self._refused.labels(status=str(status)).inc()

    def count_answer(self, counts: AnswerCounts, reasons: list[str]) -> None:
        """Count an answer that has ended, with the finish reasons of its choices."""
        for reason in reasons:
            self._ended.labels(finished_reason=reason).inc()
        for name, count in counts.calls.items():
            self._calls[name].inc(count)
        for gap in counts.gaps:
            self._per_token.observe(gap)
        if counts.first_at is not None:
            self._first.observe(counts.to_first)
            self._total.observe(counts.last_at - counts.started_at)
            self._queued.observe(counts.waited)

    def collect(self) -> Iterator[Family]:
        """Yield the metrics that are computed when they are read, as `prometheus_client` asks."""
        yield from self._engine_state()
        yield CounterMetricFamily(
            "forerun:generation_tokens", "Tokens generated.", self._counts.tokens
        )
        yield from self._speculation("forerun:spec_decode_num")
        # The same under vLLM's names, because its benchmark reads them.
        yield from self._speculation("vllm:spec_decode_num")

    def _engine_state(self) -> Iterator[Family]:
        running = 0
        waiting = 0
        used = 0.0
        memory = Memory(0, 0, 0)
        if self._worker.ready.is_set():
            engine = self._worker.engine
            memory = engine.target.memory()
            running = len(engine.running) + engine.prefilling
            waiting = len(engine.waiting)
            used = memory.used / max(1, engine.kv_memory or memory.allocated)
        yield GaugeMetricFamily(
            "forerun:num_requests_running", "Sequences that have a row.", running
        )
        yield GaugeMetricFamily("forerun:num_requests_waiting", "Sequences in the queue.", waiting)
        yield GaugeMetricFamily(
            "forerun:kv_cache_usage_perc",
            "Fraction of the memory for keys and values that is in use.",
            used,
        )
        yield CounterMetricFamily(
            "forerun:prefix_cache_hits", "Prompt tokens that were not computed again.", memory.hits
        )
        yield GaugeMetricFamily(
            "forerun:prefix_cache_bytes", "Bytes of the target's earlier texts.", memory.kept
        )
        yield GaugeMetricFamily(
            "forerun:prefix_cache_limit_bytes",
            "Most bytes of the target's earlier texts.",
            memory.kept_limit,
        )
        yield CounterMetricFamily(
            "forerun:prompt_cache_hits",
            "Prompt tokens that were read from the prompt cache on disk instead.",
            memory.read,
        )
        yield GaugeMetricFamily(
            "forerun:prompt_cache_bytes", "Bytes of the prompt cache on disk.", memory.disk
        )

    def _speculation(self, prefix: str) -> Iterator[Family]:
        counts = self._counts
        yield CounterMetricFamily(
            f"{prefix}_drafts", "Steps of the target, with or without a draft.", counts.steps
        )
        yield CounterMetricFamily(f"{prefix}_draft_tokens", "Tokens drafted.", counts.drafted)
        yield CounterMetricFamily(
            f"{prefix}_accepted_tokens", "Drafted tokens accepted.", counts.accepted
        )
        accepted = CounterMetricFamily(
            f"{prefix}_accepted_tokens_per_pos",
            "Accepted tokens by their position in the draft.",
            labels=["position"],
        )
        for position in range(max(counts.histogram, default=0)):
            reached = sum(count for length, count in counts.histogram.items() if length > position)
            accepted.add_metric([str(position)], reached)
        yield accepted

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


def with_models(metrics: Mapping[str, Metrics]) -> Iterable[Metric]:
    """Return the metrics of several models by their names, as the label `model` of each sample."""
    families: dict[str, Metric] = {}
    for model, part in metrics.items():
        for family in part.registry.collect():
            if not family.samples:  # a counter with labels that has counted nothing
                continue
            empty = Metric(family.name, family.documentation, family.type)
            samples = families.setdefault(family.name, empty).samples
            for sample in family.samples:
                samples.append(sample._replace(labels={"model": model, **sample.labels}))
    return families.values()
