"""Holds the latest value of every metric of a run, and the totals, for sinks that are asked or send at intervals.

Invariant: a reader sees a batch of events whole or not at all, from any thread. An entry that the latest event of its
kind no longer has (a phase that did not occur in this step) is gone; totals stay. Cost: of the events of one kind in a
batch only the last is looked at as a whole, since every microsecond here may be one that training waits for.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable

from closeranks.core.events import Event
from closeranks.telemetry.sinks.metrics import Labels, Metric, Rates, additions_of, owner_of, values_of


class MetricTable:
    def __init__(self) -> None:
        self._rates = Rates()
        self._lock = threading.Lock()
        self._latest: dict[tuple[str, Labels], dict[Labels, Metric]] = {}
        self._totals: dict[tuple[str, Labels], float] = defaultdict(float)

    def update(self, events: Iterable[Event]) -> None:
        last: dict[tuple[str, Labels], tuple[Event, list[Metric]]] = {}
        with self._lock:
            for event in events:
                for name, labels, value in additions_of(event):
                    self._totals[name, labels] += value
                last[event.name, owner_of(event)] = event, self._rates.observe(event)
            for event, rates in last.values():
                latest: dict[tuple[str, Labels], dict[Labels, Metric]] = {}
                for one in (*values_of(event), *rates):
                    latest.setdefault((one.name, one.owner), {})[one.entry] = one
                self._latest.update(latest)

    def latest(self) -> list[Metric]:
        with self._lock:
            return [one for group in self._latest.values() for one in group.values()]

    def totals(self) -> list[tuple[str, Labels, float]]:
        with self._lock:
            return [(name, labels, value) for (name, labels), value in self._totals.items()]
