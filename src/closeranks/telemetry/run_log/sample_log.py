"""Reads which samples each step of a run took, from ``metrics/samples-*.jsonl`` (data.log_samples).

Invariant: each micro-batch of each step counts once. Its index is global, so a step that was done again, perhaps by
other workers and on another number of them, replaces the earlier record, whichever rank wrote it. With backup workers a
step may take a micro-batch of an earlier one, and a step that is done again may take others than before: there the
latest record of a micro-batch counts, and a record says when it was written. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from closeranks.telemetry.run_log.recorder import lines_of, parse_line


@dataclass(frozen=True, slots=True)
class LoggedMicroBatch:
    """One micro-batch of one step."""

    step: int
    """Counted from 1, as steps are reported."""
    micro_batch: int
    samples: tuple[int, ...]
    skipped: tuple[int, ...] = ()
    """Those of them that were bad and have no weight."""
    of_step: int = 0
    """The step that it was planned for; differs from ``step`` if it came too late for that one."""
    time: float = 0.0
    """When it was taken, where that decides which record counts."""


@dataclass(frozen=True, slots=True)
class SampleLog:
    steps: Mapping[int, tuple[LoggedMicroBatch, ...]]
    """Micro-batches of each step, in their order."""
    conflicts: tuple[LoggedMicroBatch, ...] = ()
    """Records that were replaced by one with other samples: none, unless the order of a run was broken."""

    def samples_of(self, step: int) -> tuple[int, ...]:
        return tuple(sample for logged in self.steps.get(step, ()) for sample in logged.samples)


def build_sample_log(rows: Iterable[Mapping[str, Any]]) -> SampleLog:
    """Rows in the order in which each rank wrote them."""
    latest: dict[tuple[int, int], LoggedMicroBatch] = {}
    conflicts: list[LoggedMicroBatch] = []
    for row in rows:
        logged = LoggedMicroBatch(
            int(row["step"]),
            int(row["micro_batch"]),
            tuple(row["samples"]),
            tuple(row.get("skipped", ())),
            int(row.get("of_step", row["step"])),
            float(row.get("time", 0.0)),
        )
        place = (logged.of_step, logged.micro_batch)
        earlier = latest.get(place)
        if earlier is not None and earlier.samples != logged.samples:
            conflicts.append(earlier)
        if earlier is None or logged.time >= earlier.time:
            latest[place] = logged
    steps: dict[int, list[LoggedMicroBatch]] = {}
    for place in sorted(latest):
        steps.setdefault(latest[place].step, []).append(latest[place])
    return SampleLog({step: tuple(each) for step, each in steps.items()}, tuple(conflicts))


def read_samples(folder: Path) -> SampleLog:
    """The sample log of a run folder; an incomplete line of a killed worker is skipped."""
    rows = (
        fields
        for path in sorted(folder.glob("metrics/samples-*.jsonl"))
        for line in lines_of(path)
        if (fields := parse_line(line)) is not None
    )
    return build_sample_log(rows)
