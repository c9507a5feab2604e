"""Counts of steps: in an answer's JSON, in the shapes that clients know, and for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest

from forerun.engine.engine import Step
from forerun.engine.target import Memory
from forerun.server.worker import Worker

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


@dataclass(kw_only=True)
class Counts:
    """Sums over steps.

    tokens = accepted + steps, less what was cut off after an end.

    Attributes:
        kept: accepted tokens that are part of the answer: those after an end are cut.
        widest: drafted tokens of the largest draft.
        histogram: index j counts the steps that accepted exactly j tokens.
    """

    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    tested: int = 0
    accepted: int = 0
    kept: int = 0
    widest: int = 0
    histogram: Counter[int] = field(default_factory=Counter)

    def count(self, step: Step) -> None:
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


@dataclass(kw_only=True)
class AnswerCounts(Counts):
    """Sums over the steps of one answer, with all its choices. Times are seconds of a monotonic clock.

    Attributes:
        begun, queued: when its request came, and when it was put into the engine's queue.
        first, decoding, last: when the first tokens came, when their step began, when the last tokens came.
        waited: seconds in the queue, of the choice that waited longest.
        gaps: seconds a token, of each step after a choice's first.
        calls: tool calls that were read, and those that could not be; nothing without tools.
    """

    begun: float
    queued: float
    prompt_tokens: int
    waited: float = 0.0
    first: float | None = None
    decoding: float = 0.0
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    _latest: dict[int, float] = field(default_factory=dict)

    def add(self, choice: int, step: Step, at: float) -> None:
        """Count a step of a choice that came at `at`."""
        if not step.rows:  # it ended without a step
            return
        if self.first is None:
            self.first, self.decoding = at, max(self.queued, at - step.seconds)
        if choice in self._latest:
            self.gaps.append((at - self._latest[choice]) / max(1, len(step.tokens)))
        self.last = self._latest[choice] = at
        self.waited = max(self.waited, step.waited)
        self.count(step)

    @property
    def to_first(self) -> float:
        return 0.0 if self.first is None else self.first - self.begun

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's `usage`."""
        details = {
            "accepted_prediction_tokens": self.kept,
            "rejected_prediction_tokens": self.drafted - self.accepted,
        }
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.tokens,
            "total_tokens": self.prompt_tokens + self.tokens,
            "completion_tokens_details": details,
        }

    def statistics(self) -> dict[str, Any]:
        """Return vLLM's `metrics` and llama.cpp's `timings`."""
        seconds = self.last - self.decoding
        between = 0.0 if self.first is None else self.last - self.first
        prefill = 0.0 if self.first is None else max(0.0, self.decoding - self.queued - self.waited)
        return {
            "metrics": {
                **self.calls,
                "time_to_first_token_ms": _ms(self.to_first),
                "queue_time_ms": _ms(self.waited),
                "generation_time_ms": _ms(seconds),
                "mean_itl_ms": _ms(between / max(1, self.tokens - 1)),
                "tokens_per_second": _rate(self.tokens, seconds),
                "speculative_decoding": {
                    "mean_acceptance_length": 1 + self.accepted / max(1, self.steps),
                    "draft_acceptance_rate": self.accepted / max(1, self.drafted),
                    "tested_acceptance_rate": self.accepted / max(1, self.tested),
                    "acceptance_histogram": [
                        self.histogram[j] for j in range(max(self.histogram, default=0) + 1)
                    ],
                    "num_spec_steps": self.steps,
                    "num_draft_tokens": self.drafted,
                    "num_tested_draft_tokens": self.tested,
                    "num_accepted_draft_tokens": self.accepted,
                    "num_spec_tokens": self.widest,
                },
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


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


def _rate(tokens: int, seconds: float) -> float:
    return round(tokens / seconds, 3) if seconds else 0.0


class Metrics:
    """Figures for Prometheus, in the app's own registry. The engine is asked when they are read."""

    def __init__(self, worker: Worker) -> None:
        self.registry, self._worker = prometheus.CollectorRegistry(), worker
        self._counts = Counts()  # plain numbers, as a server has hundreds of steps a second

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> prometheus.Histogram:
            return prometheus.Histogram(
                f"forerun:{name}", text, buckets=buckets, registry=self.registry
            )

        def counter(name: str, text: str, *labels: str) -> prometheus.Counter:
            return prometheus.Counter(f"forerun:{name}", text, labels, registry=self.registry)

        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self._ended = counter(
            "request_success", "Answers that have ended, by how.", "finished_reason"
        )
        self._calls = {
            "tool_calls": counter("tool_calls", "Tool calls in answers."),
            "unparsed_tool_calls": counter(
                "unparsed_tool_calls", "Those that could not be read, and stayed text."
            ),
        }
        self._refused = counter("request_errors", "Requests answered with an error.", "status")
        self._first = histogram(
            "time_to_first_token_seconds", "From a request to its first token.", _SECONDS
        )
        self._between = histogram(
            "inter_token_latency_seconds", "A step's time divided by its tokens.", _TOKEN
        )
        self._whole = histogram(
            "e2e_request_latency_seconds", "From a request to its last token.", _SECONDS
        )
        self._queued = histogram(
            "request_queue_time_seconds", "From a request to its prefill.", _SECONDS
        )
        self.registry.register(self)  # type: ignore[arg-type]

    def step(self, step: Step, at: float) -> None:
        """Count a step of the engine, whether or not its reader is still there."""
        if step.rows:  # else a request ended without one
            self._counts.count(step)

    def status(self, status: int) -> None:
        """Count a response."""
        if status >= 400:
            self._refused.labels(status=str(status)).inc()

    def answer(self, counts: AnswerCounts, reasons: list[str]) -> None:
        """Count an answer that has ended."""
        for reason in reasons:
            self._ended.labels(finished_reason=reason).inc()
        for name, count in counts.calls.items():
            self._calls[name].inc(count)
        for gap in counts.gaps:
            self._between.observe(gap)
        if counts.first is not None:
            self._first.observe(counts.to_first)
            self._whole.observe(counts.last - counts.begun)
            self._queued.observe(counts.waited)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        counts, running, waiting, used, memory = self._counts, 0, 0, 0.0, Memory(0, 0, 0)
        if self._worker.ready.is_set():
            engine, memory = self._worker.engine, self._worker.engine.target.memory()
            running, waiting = len(engine.running) + engine.prefilling, len(engine.waiting)
            used = memory.used / max(1, engine.kv_memory or memory.allocated)
        yield GaugeMetricFamily(
            "forerun:num_requests_running", "Sequences that have a row.", running
        )
        yield GaugeMetricFamily("forerun:num_requests_waiting", "Sequences in the queue.", waiting)
        yield GaugeMetricFamily(
            "forerun:kv_cache_usage_perc", "Share of the memory for keys and values in use.", used
        )
        text = "Prompt tokens that were not computed again."
        yield CounterMetricFamily("forerun:prefix_cache_hits", text, memory.hits)
        text = "Those of them that were read from the prompt cache on disk."
        yield CounterMetricFamily("forerun:prompt_cache_hits", text, memory.read)
        yield GaugeMetricFamily(
            "forerun:prompt_cache_bytes", "Bytes of the prompt cache on disk.", memory.disk
        )
        yield CounterMetricFamily("forerun:generation_tokens", "Tokens generated.", counts.tokens)
        for prefix in (
            "forerun:spec_decode_num",
            "vllm:spec_decode_num",
        ):  # vLLM's bench reads its own names
            yield CounterMetricFamily(
                f"{prefix}_drafts", "Steps of the target, with or without a draft.", counts.steps
            )
            yield CounterMetricFamily(f"{prefix}_draft_tokens", "Tokens drafted.", counts.drafted)
            yield CounterMetricFamily(
                f"{prefix}_accepted_tokens", "Drafted tokens accepted.", counts.accepted
            )
            text = "Accepted tokens by their position in the draft."
            accepted = CounterMetricFamily(
                f"{prefix}_accepted_tokens_per_pos", text, labels=["position"]
            )
            for position in range(max(counts.histogram, default=0)):
                reached = sum(count for j, count in counts.histogram.items() if j > position)
                accepted.add_metric([str(position)], reached)
            yield accepted

    def text(self) -> bytes:
        return generate_latest(self.registry)
