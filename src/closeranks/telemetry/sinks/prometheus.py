"""Serves the metrics of a run to Prometheus, over HTTP from rank 0.

Invariants: beyond loopback nothing is served without the token, which is compared in constant time; the endpoint
returns on its port when its worker is replaced; a client that stalls or floods it costs a bounded number of threads.
"""

from __future__ import annotations

import hmac
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from closeranks.core.events import Event, Warned
from closeranks.core.system.address import Address, listen_on, parse_listen
from closeranks.core.system.fork_safety import exclude_socket_from_fork
from closeranks.core.system.secret_token import SecretKind, read_secret
from closeranks.telemetry.sinks.metric_table import MetricTable
from closeranks.telemetry.sinks.metrics import prometheus_name
from closeranks.telemetry.sinks.sink import SINKS, MissingPackageError, SinkContext, SinkMemory

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

_TOKEN = SecretKind(
    "token of the Prometheus endpoint",
    "Make one with `openssl rand -hex 32`, in a file of mode 600 that telemetry.prometheus.token_file names.",
)
_MOST_CLIENTS = 8
_CLIENT_TIMEOUT_S = 10
_Start = Callable[[str, list[tuple[str, str]]], Any]
_App = Callable[[dict[str, Any], _Start], Iterable[bytes]]


class PrometheusSink:
    name = "telemetry.prometheus"
    fix = "Choose another telemetry.prometheus.listen."

    def __init__(self, context: SinkContext) -> None:
        config = context.config.prometheus
        self._address = parse_listen(config.listen)
        self._memory = SinkMemory(context.folder)
        self._secret = b""
        if config.token_file:
            path = Path(config.token_file).expanduser()
            self._secret = read_secret(path, _TOKEN, lambda note: context.emit(Warned(note)))
        self._table = MetricTable()
        self._server: _Server | None = None
        self.address: Address | None = None
        """Where it listens."""

    def open(self) -> None:
        try:
            from prometheus_client.exposition import make_wsgi_app
        except ImportError as error:
            raise MissingPackageError(self.name, "prometheus-client") from error
        self.close()  # after a failure half-way
        app: _App = make_wsgi_app(_Collector(self._table))
        listener = listen_on(self._address.host, self._port(), what=self.name)
        exclude_socket_from_fork(listener.fileno())
        self.address = Address(self._address.host, listener.getsockname()[1])
        self._server = _Server(listener, _protected(app, self._secret) if self._secret else app)
        threading.Thread(target=self._server.serve_forever, name="sink server", daemon=True).start()
        self._memory.put("prometheus", str(self.address))

    def handle(self, events: Sequence[Event]) -> None:
        self._table.update(events)

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def _port(self) -> int:
        """If any port will do, the one that this run had before: Prometheus has been told about it."""
        if self._address.port:
            return self._address.port
        known = self._memory.get("prometheus").rpartition(":")[2]
        if known.isascii() and known.isdecimal() and int(known) < 65536 and _is_free(self._address.host, int(known)):
            return int(known)
        return 0


def _is_free(host: str, port: int) -> bool:
    try:
        listen_on(host, port).close()
    except Exception:
        return False
    return True


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_TIMEOUT_S

    def log_message(self, format: str, *arguments: Any) -> None:
        """A scrape is no news."""


class _Server(ThreadingMixIn, WSGIServer):
    """Serves each request in a thread, but no more than a few at a time; others are closed at once."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, app: _App) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_name, self.server_port = listener.getsockname()[:2]  # without the usual look-up of a name
        self.setup_environ()
        self.set_app(app)
        self._places = threading.BoundedSemaphore(_MOST_CLIENTS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away, or that stalls, is its own affair."""


def _protected(app: _App, secret: bytes) -> _App:
    expected = b"bearer " + secret

    def check(environ: dict[str, Any], start: _Start) -> Iterable[bytes]:
        scheme, _, given = str(environ.get("HTTP_AUTHORIZATION", "")).partition(" ")
        found = f"{scheme.lower()} {given.strip()}".encode("utf-8", "replace")
        if hmac.compare_digest(found, expected):
            return app(environ, start)
        start("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
        return [b"This endpoint needs the token of telemetry.prometheus.token_file as a bearer token.\n"]

    return check


class _Collector:
    """The table in the client library's terms. One family for each name, whatever its labels."""

    def __init__(self, table: MetricTable) -> None:
        self._table = table

    def collect(self) -> Iterator[Family]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        gauges, totals = defaultdict(list), defaultdict(list)
        for metric in self._table.latest():
            gauges[metric.name].append((metric.labels, metric.value))
        for name, labels, value in self._table.totals():
            totals[name].append((labels, value))
        for samples, kind, adds in ((gauges, GaugeMetricFamily, False), (totals, CounterMetricFamily, True)):
            for name, values in samples.items():
                full = prometheus_name(name, adds=adds)
                family = kind(full, f"{'Total' if adds else 'Latest value'} of {name}")
                for labels, value in values:
                    family.samples.append(_sample(full, labels, value))
                yield family


def _sample(name: str, labels: tuple[tuple[str, str], ...], value: float) -> Any:
    from prometheus_client.samples import Sample

    return Sample(name, {prometheus_name(label).removeprefix("closeranks_"): text for label, text in labels}, value)


@SINKS.register("prometheus")
def _make(context: SinkContext) -> PrometheusSink:
    return PrometheusSink(context)
