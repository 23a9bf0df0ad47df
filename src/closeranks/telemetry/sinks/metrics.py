"""What are the metrics of an event, and what is each of them called? The one place that decides it, for every sink.

Every field of an event that is a number, or a table of numbers, is a metric: a new field and a new event appear in
every sink without a change here. The tables below give better names to some, and say which add up over a run.
Invariant: pure; one metric has one name in each of the three forms (a path for trackers, Prometheus, OpenTelemetry).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, NamedTuple

from closeranks.core.events import (
    Evaluated,
    Event,
    FlopsCounted,
    MemoryUsed,
    Resources,
    RunStarted,
    Saved,
    StepDone,
    StepPhases,
)
from closeranks.telemetry.live.throughput import ThroughputMeter

Labels = tuple[tuple[str, str], ...]

PER_STEP = frozenset({StepDone.name, StepPhases.name})
"""Events that come with every step; trackers thin these out."""

_OWNERS = ("rank", "host", "tier")
"""Fields that tell of whom, or of what, the numbers of an event are."""
_INFO = ("layout", "device", "precision", "item")
_NAMES = {
    (StepDone.name, "step"): "run/step",
    **{(StepDone.name, name): f"train/{name}" for name in ("loss", "lr", "grad_norm")},
    (StepPhases.name, "seconds"): "phase/step_seconds",
}
"""Names of fields that are not ``EVENT/FIELD``. Of an event's ``step``, only this one is a
metric: for all others it says when."""
_FAMILIES = {RunStarted.name: "run"}


class _Table(NamedTuple):
    """How the entries of a field that is a table are named: ``name`` with a label, or ``path/ENTRY`` in trackers."""

    name: str
    label: str
    path: str


_TABLES = {
    (StepDone.name, "metrics"): _Table("train/metric", "metric", "train"),
    (Evaluated.name, "metrics"): _Table("eval/metric", "metric", "eval"),
    (StepPhases.name, "phases"): _Table("phase/seconds", "phase", "phase"),
    (StepPhases.name, "sent_bytes"): _Table("sent/bytes", "phase", "sent/bytes"),
    (StepPhases.name, "calls"): _Table("sent/calls", "phase", "sent/calls"),
    (MemoryUsed.name, "kinds"): _Table("memory/bytes", "kind", "memory"),
    **{
        (Resources.name, group): _Table(f"resources/{group}", "figure", f"resources/{group}")
        for group in ("process", "cgroup", "host_wide", "gpu")
    },
}
_ADD_UP = {
    StepDone.name: ("items", "num_bad", "seconds", "data_wait_s"),
    StepPhases.name: ("phases",),
    Evaluated.name: ("seconds",),
    Saved.name: ("bytes", "seconds", "stall_s"),
}
"""Fields whose sum over the run is a metric, too; a table among them is in ``_TABLES``."""


class Metric(NamedTuple):
    """One number. ``path`` is its name in trackers, where labels do not exist."""

    name: str
    value: float
    path: str
    owner: Labels = ()
    entry: Labels = ()
    """The entry of a table: the entries of the next event replace all of this one's."""

    @property
    def labels(self) -> Labels:
        return self.owner + self.entry


class Rates:
    """Metrics that need more than one event. It must see every event of a run, in their order."""

    def __init__(self) -> None:
        self._meter = ThroughputMeter(RunStarted())
        self._has_started = False
        self.step = 0
        """The latest step, for events that have none of their own."""

    def observe(self, event: Event) -> list[Metric]:
        match event:
            case RunStarted():
                self.step = event.first_step
                if self._has_started:
                    self._meter.start_generation(event)
                else:
                    self._meter, self._has_started = ThroughputMeter(event), True
            case FlopsCounted():
                self._meter.note_flops(event)
            case Evaluated():
                self._meter.pause(event.seconds)
            case Saved():
                self._meter.pause(event.stall_s)
            case StepDone():
                self.step = event.step
                reading = self._meter.observe(event)
                rates = {"train/items_per_s": reading.items_per_s, "train/mfu": reading.mfu}
                rest = {"run/peak_share": reading.peak_share, "run/eta_s": reading.eta_s}
                return [Metric(name, value, name) for name, value in (rates | rest).items() if value is not None]
        return []


def values_of(event: Event) -> Iterator[Metric]:
    """The metrics of one event."""
    owner = owner_of(event)
    for field, name in _named_fields(type(event)):
        yield from _metrics(event, field, name, owner)
    if isinstance(event, RunStarted):
        info = tuple((name, str(getattr(event, name))) for name in _INFO)
        yield Metric("run/info", 1.0, "run/info", entry=(*info, ("run", event.folder.rpartition("/")[2])))


def additions_of(event: Event) -> Iterator[tuple[str, Labels, float]]:
    """What one event adds to the totals of a run, under the names of its metrics. Every step passes here."""
    owner = owner_of(event)
    for field in _ADD_UP.get(event.name, ()):
        value = getattr(event, field)
        if isinstance(value, Mapping):
            table = _TABLES[event.name, field]
            yield from ((table.name, owner + _entry(table.label, key), number) for key, number in value.items())
        else:
            yield _field_name(event.name, field), owner, value
    yield "events", _entry("event", event.name), 1.0


@cache
def _entry(label: str, key: str) -> Labels:
    return ((label, key),)


def owner_of(event: Event) -> Labels:
    names = _owner_fields(type(event))
    return tuple((name, str(getattr(event, name))) for name in names) if names else ()


def _metrics(event: Event, field: str, name: str, owner: Labels) -> Iterator[Metric]:
    value = getattr(event, field)
    suffix = "".join(f"/{label}-{text}" for label, text in owner)
    if isinstance(value, Mapping):
        naming = _TABLES.get((event.name, field)) or _Table(name, field.removesuffix("s"), name)
        for key, number in _flat(value):
            yield Metric(naming.name, number, f"{naming.path}/{key}{suffix}", owner, ((naming.label, key),))
    elif isinstance(value, int | float):
        yield Metric(name, float(value), name + suffix, owner)


_FIELDS: dict[type[Event], tuple[tuple[str, str], ...]] = {}
_OWNER_FIELDS: dict[type[Event], tuple[str, ...]] = {RunStarted: ()}


def _owner_fields(kind: type[Event]) -> tuple[str, ...]:
    if kind not in _OWNER_FIELDS:
        _OWNER_FIELDS[kind] = tuple(one.name for one in fields(kind) if one.name in _OWNERS)
    return _OWNER_FIELDS[kind]


def _named_fields(kind: type[Event]) -> tuple[tuple[str, str], ...]:
    """Each field that may hold a metric, and the name of that."""
    if kind not in _FIELDS:
        names = [(one.name, _field_name(kind.name, one.name)) for one in fields(kind)]
        _FIELDS[kind] = tuple((field, name) for field, name in names if name)
    return _FIELDS[kind]


@cache
def _field_name(event: str, field: str) -> str:
    default = "" if field == "step" or field in _OWNERS else f"{_FAMILIES.get(event, event)}/{field}"
    return _NAMES.get((event, field), default)


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, int | float):
            yield f"{prefix}{key}", float(value)


@cache
def prometheus_name(name: str, *, adds: bool = False) -> str:
    """``train/items_per_s`` is ``closeranks_train_items_per_second``; totals end in ``_total``."""
    words = re.sub(r"[^a-zA-Z0-9]+", "_", name).strip("_")
    words = re.sub(r"_per_s$", "_per_second", words)
    words = re.sub(r"(?<!_per)_s$", "_seconds", words)
    return f"closeranks_{words}_total" if adds else f"closeranks_{words}"


@cache
def otlp_name(name: str, *, adds: bool = False) -> str:
    """``train/loss`` is ``closeranks.train.loss``; totals end in ``.total``."""
    words = re.sub(r"[^a-zA-Z0-9_]+", ".", name).strip(".")
    return f"closeranks.{words}.total" if adds else f"closeranks.{words}"
