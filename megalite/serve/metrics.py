"""The server's metrics in Prometheus' text format."""

import time
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class ServerMetrics:
    """Counters, gauges and histograms of one server, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        counter = partial(Counter, registry=self._registry)
        histogram = partial(Histogram, registry=self._registry)
        self.requests = counter("megalite_requests", "Answered requests", ["path", "status"])
        self.disconnects = counter("megalite_disconnects", "Requests whose client went away")
        self.prompt_tokens = counter("megalite_prompt_tokens", "Tokens of prompts")
        self.generated_tokens = counter("megalite_generated_tokens", "New tokens")
        about = "Sequences that run or wait"
        self.active = Gauge("megalite_active_sequences", about, registry=self._registry)
        about = "From a request's head to its last byte"
        self.request_seconds = histogram("megalite_request_seconds", about, buckets=_SECONDS)
        about = "From admission to the first token"
        self.first_token_seconds = histogram("megalite_first_token_seconds", about, buckets=_SECONDS)
        about = "Between two tokens of a sequence"
        self.inter_token_seconds = histogram("megalite_inter_token_seconds", about, buckets=_TOKEN_SECONDS)

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
