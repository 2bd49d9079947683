"""The server's metrics in Prometheus' text format."""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class ServerMetrics:
    """Counters, gauges and histograms of one server, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "megalite_requests", "Answered requests", ["path", "status"], registry=registry
        )
        self.disconnects = Counter(
            "megalite_disconnects", "Requests whose client went away", registry=registry
        )
        self.prompt_tokens = Counter("megalite_prompt_tokens", "Tokens of prompts", registry=registry)
        self.generated_tokens = Counter("megalite_generated_tokens", "New tokens", registry=registry)
        self.active = Gauge("megalite_active_sequences", "Sequences that run or wait", registry=registry)
        self.request_seconds = Histogram(
            "megalite_request_seconds",
            "From a request's head to its last byte",
            buckets=_SECONDS,
            registry=registry,
        )
        self.first_token_seconds = Histogram(
            "megalite_first_token_seconds",
            "From admission to the first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self.inter_token_seconds = Histogram(
            "megalite_inter_token_seconds",
            "Between two tokens of a sequence",
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class TokenClock:
    """Times the tokens of one request. sequences: their number."""

    def __init__(self, metrics: ServerMetrics, sequences: int):
        self._metrics, self._begin = metrics, time.perf_counter()
        self._last: list[float | None] = [None] * sequences
        self._first = True

    def token(self, index: int) -> None:
        """Note a token of sequence `index`."""
        now, last = time.perf_counter(), self._last[index]
        self._last[index] = now
        self._metrics.generated_tokens.inc()
        if self._first:
            self._metrics.first_token_seconds.observe(now - self._begin)
            self._first = False
        if last is not None:
            self._metrics.inter_token_seconds.observe(now - last)
