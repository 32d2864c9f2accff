"""What a server counts, for Prometheus."""

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """The metrics of one server, in a registry of its own. Only names of programs and statuses are labels."""

    def __init__(self, names: Iterable[str]) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._requests = Counter("lrpfx_requests", "Requests by status.", ("model", "status"), registry=self.registry)
        self._seconds = self._histogram("lrpfx_request_seconds", "From a request to its answer.", _SECONDS)
        self._rows = self._histogram("lrpfx_batch_rows", "Rows that were computed together.", _ROWS)
        self._batch_seconds = self._histogram("lrpfx_batch_seconds", "Computing a batch.", _SECONDS)
        self._ready = Gauge("lrpfx_ready", "Whether the self-test has passed.", labelnames=("model",), registry=self.registry)
        self._waiting = Gauge("lrpfx_waiting_requests", "Requests that wait to be computed.", registry=self.registry)
        for name in names:  # a metric exists from the start, at zero
            for metric in (self._seconds, self._rows, self._batch_seconds, self._ready):
                metric.labels(name)

    def _histogram(self, name: str, description: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, description, buckets=buckets, labelnames=("model",), registry=self.registry)

    def request(self, name: str, status: int, seconds: float) -> None:
        """Count an answer."""
        self._requests.labels(name, str(status)).inc()
        self._seconds.labels(name).observe(seconds)

    def batch(self, name: str, rows: int, seconds: float) -> None:
        """Count a batch."""
        self._rows.labels(name).observe(rows)
        self._batch_seconds.labels(name).observe(seconds)

    def ready(self, name: str) -> None:
        """The self-test of a program has passed."""
        self._ready.labels(name).set(1)

    def count_waiting(self, count: Callable[[], int]) -> None:
        """Ask `count` for the number of requests that wait."""
        self._waiting.set_function(count)

    def text(self, accepted: str) -> tuple[bytes, str]:
        """All metrics in a form that a header `Accept` allows, and their content type."""
        encode, content_type = choose_encoder(accepted)
        return encode(self.registry), content_type
