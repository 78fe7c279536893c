"""The metrics of the server, in the form of Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.latency = Histogram(
            "acclimate_request_seconds", "Time from a request to its reply", registry=registry, buckets=SECONDS
        )
        self.requests = Counter("acclimate_requests", "Requests by status code", ["code"], registry=registry)
        self.images = Counter("acclimate_images", "Images that were predicted", registry=registry)
        self.learned = Counter("acclimate_learned", "Images that were learned from", registry=registry)
        self.steps = Counter("acclimate_steps", "Steps of adaptation", registry=registry)
        self.skipped = Counter(
            "acclimate_skipped", "Batches that were only predicted, by reason", ["reason"], registry=registry
        )
        self.events = Counter("acclimate_events", "Events of the guard and of methods", ["kind"], registry=registry)
        self.failures = Counter("acclimate_failures", "Steps that failed behind their reply", registry=registry)
        self.queue = Gauge("acclimate_queue_images", "Images that wait", registry=registry)
        self.streams = Gauge("acclimate_streams", "Streams, in memory and in all", ["where"], registry=registry)
        self.harm = Gauge("acclimate_estimated_harm", "Largest estimated harm of the streams in memory", registry=registry)
        self.accuracy = Gauge(
            "acclimate_estimated_accuracy", "Lowest estimated accuracy of the streams in memory", registry=registry
        )
        self.write_failures = Gauge("acclimate_write_failures", "Writes of states that failed", registry=registry)
