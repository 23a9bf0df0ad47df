"""Sends the metrics of a run to an OpenTelemetry collector, in intervals, over HTTP.

The SDK's own reader would do this in a thread that it starts again in every process forked from a worker. So only its
data types and its exporter are used, on the sink's thread. Invariant: nothing is queued: an export carries the latest
values and the totals, so one that fails is made up by the next.
"""

from __future__ import annotations

import logging
import random
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from closeranks import __version__
from closeranks.core.events import Event, RunEnded
from closeranks.telemetry.sinks.metric_table import MetricTable
from closeranks.telemetry.sinks.metrics import Labels, otlp_name
from closeranks.telemetry.sinks.sink import SINKS, MissingPackageError, SinkContext

_TIMEOUT_S = 5.0
_LOGGER = "opentelemetry.exporter.otlp"


class OtlpSink:
    name = "telemetry.otlp"
    fix = "Check that a collector listens at telemetry.otlp.endpoint."

    def __init__(self, context: SinkContext) -> None:
        self._config, self._run = context.config.otlp, context.folder.name
        self._table = MetricTable()
        self._began_ns, self._due_at = time.time_ns(), 0.0
        self._errors = _LastError()

    def open(self) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        except ImportError as error:
            raise MissingPackageError(self.name, "opentelemetry-exporter-otlp-proto-http") from error
        self._errors.attach()
        self._exporter = OTLPMetricExporter(endpoint=self._config.url, timeout=_TIMEOUT_S)
        _leave_random_alone()

    def handle(self, events: Sequence[Event]) -> None:
        self._table.update(events)
        is_last = isinstance(events[-1], RunEnded)
        if is_last or time.monotonic() >= self._due_at:
            self._export()
            self._due_at = time.monotonic() + self._config.every_s

    def close(self) -> None:
        try:
            self._export()
        finally:
            self._exporter.shutdown()
            self._errors.detach()

    def _export(self) -> None:
        from opentelemetry.sdk.metrics.export import MetricExportResult

        self._errors.text = ""
        if self._exporter.export(self._data()) is not MetricExportResult.SUCCESS:
            raise ConnectionError(self._errors.text)

    def _data(self) -> Any:
        from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        resource = Resource.create({"service.name": "closeranks", "closeranks.run": self._run})
        scope = InstrumentationScope("closeranks", __version__)
        return MetricsData([ResourceMetrics(resource, [ScopeMetrics(scope, self._points(), "")], "")])

    def _points(self) -> list[Any]:
        from opentelemetry.sdk.metrics.export import AggregationTemporality, Gauge, Metric, NumberDataPoint, Sum

        now = time.time_ns()
        gauges: dict[str, list[Any]] = defaultdict(list)
        totals: dict[str, list[Any]] = defaultdict(list)

        def point(labels: Labels, value: float) -> Any:
            return NumberDataPoint(dict(labels), self._began_ns, now, value)

        for one in self._table.latest():
            gauges[otlp_name(one.name)].append(point(one.labels, one.value))
        for name, labels, value in self._table.totals():
            totals[otlp_name(name, adds=True)].append(point(labels, value))
        cumulative = AggregationTemporality.CUMULATIVE
        return [
            *(Metric(name, "", "", Gauge(points)) for name, points in gauges.items()),
            *(Metric(name, "", "", Sum(points, cumulative, is_monotonic=True)) for name, points in totals.items()),
        ]


def _leave_random_alone() -> None:
    """The exporter draws the wait before a possible retry from Python's global generator, at every export. That stream
    belongs to the user's code: a run must draw the same numbers with and without this sink."""
    try:
        from opentelemetry.exporter.otlp.common import http
    except ImportError:  # earlier releases wait by a plain rule
        return
    if vars(http).get("random") is random:
        vars(http)["random"] = random.Random()


class _LastError(logging.Handler):
    """Why an export failed: the exporter only logs it, and would do so in the worker's output each time."""

    text = ""

    def attach(self) -> None:
        logger = logging.getLogger(_LOGGER)
        logger.addHandler(self)
        logger.propagate = False

    def detach(self) -> None:
        logger = logging.getLogger(_LOGGER)
        logger.removeHandler(self)
        logger.propagate = True

    def emit(self, record: logging.LogRecord) -> None:
        """The first message says why, later ones that it was tried again. Of an error of the network, which quotes all
        errors that it was caused by, the first cause is enough."""
        text = record.getMessage()
        cause = re.search(r"\[Errno \d+\] ([^\"')]+)", text)
        self.text = self.text or (cause[1] if cause else text)


@SINKS.register("otlp")
def _make(context: SinkContext) -> OtlpSink:
    return OtlpSink(context)
