"""What an engine does, as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..runtime.serving.engine import Engine

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)

COUNTED = {
    "rejected": "Requests turned away: the queue was full",
    "prompt_tokens": "Tokens of prompts",
    "reused_tokens": "Tokens of prompts whose cache rows were there already",
    "new_tokens": "Generated tokens",
    "draft_tokens": "Draft tokens that were verified",
    "accepted_tokens": "Draft tokens that were accepted",
    "steps": "Decode steps",
    "sequence_steps": "Decode steps times the requests in them",
}


class Metrics:
    """first: seconds to a request's first text; whole: to its end."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Engine(engine))
        about = ("graftwork_first_token_seconds", "Seconds to the first token")
        self.first = Histogram(*about, registry=self.registry, buckets=SECONDS)
        about = ("graftwork_request_seconds", "Seconds to the end of a request")
        self.whole = Histogram(*about, registry=self.registry, buckets=SECONDS)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        found: bytes = generate_latest(self.registry)
        return found


class _Engine(Collector):
    """An engine's own figures."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def collect(self) -> Iterator[Metric]:
        """All of them."""
        figures = self.engine.figures
        yield GaugeMetricFamily("graftwork_running", "Requests in slots", figures.running)
        yield GaugeMetricFamily("graftwork_waiting", "Requests in the queue", figures.waiting)
        yield GaugeMetricFamily("graftwork_slots", "Slots", self.engine.count)
        ended = CounterMetricFamily("graftwork_requests", "Requests that ended", labels=["reason"])
        for reason, count in dict(figures.ended).items():
            ended.add_metric([reason], count)
        yield ended
        for name, about in COUNTED.items():
            yield CounterMetricFamily(f"graftwork_{name}", about, getattr(figures, name))
        about = "Seconds in which there was something to do"
        yield CounterMetricFamily("graftwork_busy_seconds", about, figures.busy)
