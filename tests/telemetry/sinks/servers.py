"""Servers that tests send metrics to, in this process, on free ports."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest


class Collector:
    """What an OpenTelemetry collector received."""

    def __init__(self) -> None:
        self.requests: list[ExportMetricsServiceRequest] = []
        self.paths: set[str] = set()
        self.headers: dict[str, str] = {}
        self.status = 200
        self.endpoint = ""
        self._changed = threading.Condition()

    def receive(self, path: str, headers: dict[str, str], body: bytes) -> int:
        with self._changed:
            self.paths.add(path)
            self.headers = headers
            if self.status == 200:
                data = gzip.decompress(body) if headers.get("content-encoding") == "gzip" else body
                self.requests.append(ExportMetricsServiceRequest.FromString(data))
            self._changed.notify_all()
            return self.status

    def wait_for(self, number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.requests) >= number, 60)

    def latest(self) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
        """Values of the last request by name and attributes."""
        found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for resource in self.requests[-1].resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    points: Any = metric.gauge.data_points or metric.sum.data_points
                    found[metric.name] = {
                        tuple((one.key, one.value.string_value) for one in point.attributes): point.as_double
                        for point in points
                    }
        return found

    def resource(self) -> dict[str, str]:
        attributes = self.requests[-1].resource_metrics[0].resource.attributes
        return {one.key: one.value.string_value for one in attributes}


@contextmanager
def collector(port: int = 0) -> Iterator[Collector]:
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            self.send_response(found.receive(self.path, headers, body))
            self.end_headers()

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    found.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
