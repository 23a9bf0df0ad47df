"""Sums up stretches of a rank's metrics, so that a long run can be drawn without reading every event. Pure.

A block covers all bytes of a stretch: sums and extremes of its steps and phases, and where its other events are, which
are few. Invariants: a session (``run_started``) begins a block, so that steps which are done again later are in others;
the blocks of all ranks end after the same steps; every number in a block is finite.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any
from zlib import crc32

from closeranks.core.dataclass_fields import checked_fields
from closeranks.core.events import Event, Resources, RunStarted, SaveFailed, StepDone, StepPhases, Warned

STEPS = 256
"""A block ends after a step that this divides."""
LEAD_STEPS = 64
"""The first block of a session ends earlier: it is always read step by step."""
_MARK = b', "crc": '
_LARGEST = 1e300
_FAR = 10**11
"""As in a line of the metrics (``recorder``): no step and no instant is larger."""


@dataclass(frozen=True, slots=True)
class StepBlock:
    begin: int
    """The stretch: offsets in the metrics file, of lines that are whole."""
    end: int
    tail_bytes: int = 0
    """Length of the last line,"""
    tail_crc: int = 0
    """and its checksum: a block of another file does not fit."""
    at: float = 0.0
    """When its last event was recorded, on the wall clock."""
    start: int | None = None
    """The steps that were finished when the session began, if one begins here."""
    first: int = 0
    """The first step,"""
    last: int = 0
    """the last, and their number; 0: there is no step in it."""
    num: int = 0
    num_skipped: int = 0
    num_bad: int = 0
    items: int = 0
    seconds: float = 0.0
    skipped_items: int = 0
    skipped_s: float = 0.0
    memory_bytes: int = 0
    """The highest."""
    loss: dict[str, float] = field(default_factory=dict)
    """``low``, ``mean`` and ``high`` of the values that are finite, of the steps that were taken; empty without any."""
    grad_norm: dict[str, float] = field(default_factory=dict)
    lr: dict[str, float] = field(default_factory=dict)
    rate: dict[str, float] = field(default_factory=dict)
    """Items per second."""
    num_phases: int = 0
    """Steps whose phases are in the block: a step's phases are recorded after the next one has begun."""
    phases_s: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds by phase, over all of these steps."""
    energy_j: float = 0.0
    others: list[int] = field(default_factory=list)
    """Where further events are: begin and end of each stretch of lines, all that have no list of their own,"""
    warnings: list[int] = field(default_factory=list)
    """warnings and failed saves,"""
    samples: list[int] = field(default_factory=list)
    """and ``resources``."""

    @property
    def step(self) -> int:
        """The last step."""
        return self.last

    def mean_phases(self) -> StepPhases:
        """A step in the middle of the block that took as long as its mean."""
        num = max(1, self.num_phases)
        phases = {name: spent / num for name, spent in self.phases.items()}
        return StepPhases((self.first + self.last) // 2, self.phases_s / num, phases)


class BlockBuilder:
    """Takes the events of one rank in the order of their lines; ``add`` returns a block whenever one is complete."""

    def __init__(self, offset: int) -> None:
        """``offset``: of the first line."""
        self.end = offset
        """The end of the last line that was added."""
        self._clear()

    def _clear(self) -> None:
        self._begin, self._at, self._line = self.end, 0.0, b""
        self._start: int | None = None
        self._steps: list[StepDone] = []
        self._phases: list[StepPhases] = []
        self._energy_j = 0.0
        self._ranges: dict[str, Any] = {}

    def add(self, event: Event | None, at: float, line: bytes) -> StepBlock | None:
        """``event`` is None for a line that is none, or of a kind that this version does not know."""
        done = None
        kind = type(event)
        if kind is StepDone:
            self._steps.append(event)  # type: ignore[arg-type]
        elif kind is StepPhases:
            self._phases.append(event)  # type: ignore[arg-type]
        else:
            if isinstance(event, RunStarted):
                done = self.finish()
                self._start = event.first_step
            self._note(event, len(line))
        self.end += len(line)
        self._at, self._line = at, line
        return self.finish() if kind is StepDone and self._is_full() else done

    def finish(self) -> StepBlock | None:
        """A block of what was added since the last one."""
        if self.end == self._begin:
            return None
        block = StepBlock(
            begin=self._begin,
            end=self.end,
            tail_bytes=len(self._line),
            tail_crc=crc32(self._line),
            at=_bounded(self._at),
            start=self._start,
            **step_figures(self._steps),
            **_phase_figures(self._phases),
            energy_j=_bounded(self._energy_j),
            **self._ranges,
        )
        self._clear()
        return block

    def _is_full(self) -> bool:
        return self._steps[-1].step % STEPS == 0 or len(self._steps) >= (STEPS if self._start is None else LEAD_STEPS)

    def _note(self, event: Event | None, num_bytes: int) -> None:
        name = "warnings" if isinstance(event, Warned | SaveFailed) else "others"
        if isinstance(event, Resources):
            name = "samples"
            self._energy_j += event.gpu.get("energy_j", 0.0)
        ranges: list[int] = self._ranges.setdefault(name, [])
        if ranges and ranges[-1] == self.end:
            ranges[-1] += num_bytes
        else:
            ranges += (self.end, self.end + num_bytes)


def step_figures(steps: Sequence[StepDone]) -> dict[str, Any]:
    """The fields of a block about these steps."""
    if not steps:
        return {}
    skipped = [step for step in steps if not step.taken]
    return {
        "first": min(step.step for step in steps),
        "last": max(step.step for step in steps),
        "num": len(steps),
        "num_skipped": len(skipped),
        "num_bad": sum(step.num_bad for step in steps),
        "items": sum(step.items for step in steps),
        "seconds": _bounded(sum(step.seconds for step in steps)),
        "skipped_items": sum(step.items for step in skipped),
        "skipped_s": _bounded(sum(step.seconds for step in skipped)),
        "memory_bytes": max(step.memory_bytes for step in steps),
        "loss": _spread([step.loss for step in steps if step.taken]),
        "grad_norm": _spread([step.grad_norm for step in steps]),
        "lr": _spread([step.lr for step in steps]),
        "rate": _spread([step.items / step.seconds for step in steps if step.seconds > 0]),
    }


def _phase_figures(steps: Sequence[StepPhases]) -> dict[str, Any]:
    totals: dict[str, float] = {}
    for step in steps:
        for name, spent in step.phases.items():
            totals[name] = totals.get(name, 0.0) + spent
    seconds = _bounded(sum(step.seconds for step in steps))
    phases = {name: _bounded(total) for name, total in totals.items()}
    return {"num_phases": len(steps), "phases_s": seconds, "phases": phases}


def _spread(values: Sequence[float]) -> dict[str, float]:
    total = sum(values)
    finite = values if math.isfinite(total) else [value for value in values if math.isfinite(value)]
    if not finite:
        return {}
    mean = min(max(sum(finite) / len(finite), -_LARGEST), _LARGEST)
    return {"low": min(finite), "mean": mean, "high": max(finite)}


def _bounded(value: float) -> float:
    return value if 0 <= value < _LARGEST else 0.0


def append_block(blocks: list[StepBlock], block: StepBlock) -> None:
    """Add a block that has steps, in place of those whose steps it does again."""
    while blocks and blocks[-1].first >= block.first:
        blocks.pop()
    blocks.append(block)


_NAMES = tuple(one.name for one in fields(StepBlock))
_ENCODE: Callable[[Any], str] = json.JSONEncoder(allow_nan=False).encode


def to_index_line(block: StepBlock) -> bytes:
    """One JSON line with a checksum."""
    values = {name: value for name in _NAMES if (value := getattr(block, name)) not in (0, None, {}, [])}
    if block.start is not None:
        values["start"] = block.start
    text = _ENCODE(values)[:-1].encode()
    return b"%s%s%d}\n" % (text, _MARK, crc32(text))


def parse_index_line(line: bytes) -> StepBlock | None:
    """None for a line that is incomplete or damaged, or that no version wrote."""
    text, mark, checksum = line.rpartition(_MARK)
    try:
        if not mark or crc32(text) != int(checksum.rstrip(b"}\n")):
            return None
        values = json.loads(text + b"}")
        values.setdefault("begin", 0)
        block = StepBlock(**checked_fields(StepBlock, values))
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    return block if _is_sound(block) else None


def _is_sound(block: StepBlock) -> bool:
    spreads = (block.loss, block.grad_norm, block.lr, block.rate)
    if not 0 <= block.begin <= block.end - block.tail_bytes < block.end:
        return False
    if block.num < 0 or block.num_phases < 0 or block.first > block.last:
        return False
    if not all(abs(value) <= _FAR for value in (block.at, block.start or 0, block.first, block.last)):
        return False
    if not all(spread.keys() in (set(), {"low", "mean", "high"}) for spread in spreads):
        return False
    ranges = (block.others, block.warnings, block.samples)
    return _are_finite(block, spreads) and all(_lie_within(one, block) for one in ranges)


def _are_finite(block: StepBlock, groups: Iterable[Mapping[str, float]]) -> bool:
    values = (block.at, block.seconds, block.skipped_s, block.phases_s, block.energy_j, *block.phases.values())
    return all(map(math.isfinite, (*values, *(value for group in groups for value in group.values()))))


def _lie_within(ranges: Sequence[int], block: StepBlock) -> bool:
    if not ranges:
        return True
    is_ascending = all(first < second for first, second in pairwise(ranges))
    return len(ranges) % 2 == 0 and block.begin <= ranges[0] and ranges[-1] <= block.end and is_ascending
