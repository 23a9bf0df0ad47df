"""Logs a run in MLflow, through MLflow's own client.

Invariant: one run of ours is one run of MLflow, whatever happens to its workers: its id is kept in the run folder, and
a later generation, or a resumed run in the same folder, continues it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from closeranks.core.events import Event, RunEnded
from closeranks.telemetry.sinks.metrics import Rates
from closeranks.telemetry.sinks.sink import SINKS, MissingPackageError, SinkContext, SinkMemory, tracked

_MOST_METRICS, _MOST_PARAMS, _MOST_CHARACTERS = 1000, 100, 500
"""Of one request, and of the value of a parameter: MLflow's limits."""
_REFUSED = re.compile(r"[^\w\-. /:]")
"""Characters that a name cannot have."""
_STATUS = {"failed": "FAILED", "drained": "KILLED"}


class MlflowSink:
    name = "telemetry.mlflow"
    fix = "Check telemetry.mlflow.tracking_uri (or MLFLOW_TRACKING_URI) and that the server answers."

    def __init__(self, context: SinkContext) -> None:
        self._config, self._job, self._run_name = context.config.mlflow, context.job, context.folder.name
        self._memory = SinkMemory(context.folder)
        self._rates = Rates()
        self._run_id = ""
        self._status = ""

    def open(self) -> None:
        try:
            from mlflow import MlflowClient
        except ImportError as error:
            raise MissingPackageError(self.name, "mlflow") from error
        self._client = MlflowClient(tracking_uri=self._config.tracking_uri or None)
        self._run_id = self._run_id or self._memory.get("mlflow")
        if self._run_id:
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            self._begin()
        self._memory.put("mlflow", self._run_id)  # a full disk is tried again, and makes no second run

    def handle(self, events: Sequence[Event]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        series = tracked(events, self._rates, self._config.every)
        metrics = [
            Metric(_REFUSED.sub("_", path), value, now, step)
            for step, values in series.items()
            for path, value in values.items()
        ]
        for part in _parts(metrics, _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=part, synchronous=True)
        self._status = next((_status(one) for one in events if isinstance(one, RunEnded)), self._status)

    def close(self) -> None:
        """If no end was seen, another generation continues the run."""
        if self._status:
            self._client.set_terminated(self._run_id, self._status)

    def _begin(self) -> None:
        from mlflow.entities import Param

        experiment = self._client.get_experiment_by_name(self._config.experiment)
        number = experiment.experiment_id if experiment else self._client.create_experiment(self._config.experiment)
        self._run_id = self._client.create_run(number, run_name=self._run_name).info.run_id
        params = [Param(key, str(value)[:_MOST_CHARACTERS]) for key, value in _flat(self._job)]
        for part in _parts(params, _MOST_PARAMS):
            self._client.log_batch(self._run_id, params=part, synchronous=True)


def _status(ended: RunEnded) -> str:
    return _STATUS.get(ended.reason, "FINISHED")


def _parts(values: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (values[start : start + size] for start in range(0, len(values), size))


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@SINKS.register("mlflow")
def _make(context: SinkContext) -> MlflowSink:
    return MlflowSink(context)
