"""Figures for Prometheus, in a registry of each app's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest

from forerun.engine import Engine, Step
from forerun.server.statistics import Tally

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_DRAFTS = {
    "num_drafts": "Steps of the target, with and without a draft.",
    "num_draft_tokens": "Tokens drafted.",
    "num_accepted_tokens": "Drafted tokens that the target accepted.",
}


class Metrics:
    """Counters and histograms that jobs feed, and gauges read from the engine when they are asked for."""

    def __init__(self, engine: Callable[[], Engine | None]) -> None:
        self.registry = CollectorRegistry()
        self._engine = engine

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        # Plain numbers, as a server has hundreds of steps a second; `collect` gives them out.
        self._drafts = [0.0] * len(_DRAFTS)
        self._positions: list[int] = []
        self._tokens = 0
        self.prompt_tokens = counter("forerun:prompt_tokens", "Tokens of prompts.")
        self.ended = counter("forerun:request_success", "Answers that have ended, by how.", ("finished_reason",))
        self.refused = counter("forerun:request_errors", "Requests answered with an error.", ("status",))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"forerun:{name}", text, buckets=buckets, registry=self.registry)

        self.first = histogram("time_to_first_token_seconds", "From a request to its first token.", _SECONDS)
        self.between = histogram("inter_token_latency_seconds", "A step's time divided by its tokens.", _TOKEN)
        self.whole = histogram("e2e_request_latency_seconds", "From a request to its last token.", _SECONDS)
        self.queued = histogram("request_queue_time_seconds", "From a request to its prefill.", _SECONDS)
        self.registry.register(self)  # type: ignore[arg-type]

    def step(self, step: Step, at: float) -> None:
        """Counts a step of the engine, whoever reads it."""
        if not step.rows:  # of a request that was ended without one
            return
        for which, value in enumerate((1, step.drafted, step.accepted)):
            self._drafts[which] += value
        self._positions += [0] * (step.accepted - len(self._positions))
        for position in range(step.accepted):
            self._positions[position] += 1
        self._tokens += len(step.tokens)

    def answer(self, tally: Tally, reasons: list[str]) -> None:
        """Counts an answer that has ended."""
        for reason in reasons:
            self.ended.labels(finished_reason=reason).inc()
        for gap in tally.gaps:
            self.between.observe(gap)
        if tally.first is not None:
            self.first.observe(tally.to_first)
            self.whole.observe(tally.total)
            self.queued.observe(tally.waited)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        engine = self._engine()
        running = waiting = hits = used = 0.0
        if engine is not None:
            running = len(engine.running) + engine.prefilling
            waiting = len(engine.waiting)
            cache, prefixes = engine.target.cache, engine.target.prefixes
            hits = prefixes.hit_tokens if prefixes is not None else 0
            used = cache.used_bytes / max(1, engine.kv_memory or cache.allocated_bytes)
        yield GaugeMetricFamily("forerun:num_requests_running", "Sequences that have a row.", running)
        yield GaugeMetricFamily("forerun:num_requests_waiting", "Sequences in the queue.", waiting)
        yield GaugeMetricFamily("forerun:kv_cache_usage_perc", "Share of the memory for keys and values in use.", used)
        yield CounterMetricFamily("forerun:prefix_cache_hits", "Prompt tokens that were not computed again.", hits)
        yield CounterMetricFamily("forerun:generation_tokens", "Tokens generated.", self._tokens)
        for space in ("forerun", "vllm"):  # vLLM's names as well: its bench reads them
            for (name, text), value in zip(_DRAFTS.items(), self._drafts, strict=True):
                yield CounterMetricFamily(f"{space}:spec_decode_{name}", text, value)
            name, text = "num_accepted_tokens_per_pos", "Accepted tokens by their position in the draft."
            accepted = CounterMetricFamily(f"{space}:spec_decode_{name}", text, labels=["position"])
            for position, count in enumerate(self._positions):
                accepted.add_metric([str(position)], count)
            yield accepted

    def text(self) -> bytes:
        return generate_latest(self.registry)
