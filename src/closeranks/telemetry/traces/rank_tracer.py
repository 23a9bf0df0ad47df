"""Traces a few steps of this rank with torch's profiler, once.

The step before the first one is a warm-up: the profiler is prepared in it (loading it takes a second or more the first
time), and nothing of that step is recorded. Invariants: nothing here changes a number; a failure is told, leaves the
profiler stopped and does not end the run; training waits while torch writes the events down, and not for their
compression.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from closeranks.core.system.background_thread import BackgroundThread
from closeranks.core.system.environment import set_default
from closeranks.telemetry.traces.phase_timeline import PhaseTimeline
from closeranks.telemetry.traces.trace_file import METADATA, failure_file, write_trace


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """What a trace says about its rank."""

    request: str
    """The request that it belongs to."""
    rank: int
    host: str
    clock: str
    """Equal for ranks that read the same clock."""
    place: str
    """Its coordinates on the axes of the layout, in words."""


class RankTracer:
    """Call sequence: ``begin`` as each step begins, until ``is_done``; ``close`` if the run ends before."""

    def __init__(
        self,
        steps: tuple[int, int],
        path: Path,
        identity: RankIdentity,
        instants: Sequence[tuple[int, int]],
        writer: BackgroundThread,
        on_problem: Callable[[str], None],
    ) -> None:
        """``steps``: the first and the last. ``instants``: see ``clock_offsets``. ``writer`` compresses."""
        self._first, self._last = steps
        self._path = path
        self._identity, self._instants = identity, instants
        self._writer, self._on_problem = writer, on_problem
        self._profile: profile | None = None
        self._mark: record_function | None = None
        self._timeline: PhaseTimeline | None = None
        self.is_done = False

    def covers(self, step: int) -> bool:
        """Whether the step is traced; ``begin`` takes longer before and after those."""
        return self._first <= step <= self._last

    def begin(self, step: int) -> None:
        """Step ``step`` begins, and the one before has ended."""
        try:
            if self._profile is None:
                self._prepare()
            if self.covers(step):
                self._begin_traced(step)
            elif step > self._last:
                self._finish()
        except Exception as error:
            self._fail(error)

    def close(self) -> None:
        """No step follows: write what there is."""
        if self.is_done:
            return
        try:
            self._finish()
        except Exception as error:
            self._fail(error)

    def _prepare(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _check_free()
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        set_default("KINETO_LOG_LEVEL", "6")  # it reports its own progress on stderr otherwise
        self._profile = profile(activities=activities, acc_events=True)
        self._profile.prepare_trace()

    def _begin_traced(self, step: int) -> None:
        assert self._profile is not None
        self._end_mark()
        if self._timeline is None:
            _check_free()
            self._profile.start_trace()
            self._timeline = PhaseTimeline()
        self._timeline.begin_step(step)
        self._mark = record_function(f"step {step}")
        self._mark.__enter__()

    def _end_mark(self) -> None:
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None

    def _finish(self) -> None:
        """Stop, and let the writer compress what was recorded."""
        self.is_done = True
        self._end_mark()
        if self._profile is None or self._timeline is None:
            return
        timeline, taken = self._timeline, self._profile
        timeline.end()
        metadata = {**asdict(self._identity), "steps": timeline.steps, "phases": timeline.phases}
        taken.add_metadata_json(METADATA, json.dumps({**metadata, "instants": self._instants}))
        taken.stop_trace()
        self._profile = None
        raw = self._path.with_name(f".{self._path.stem}")
        taken.export_chrome_trace(str(raw))
        self._writer.submit(lambda: self._write(raw))

    def _write(self, raw: Path) -> None:
        try:
            write_trace(raw, self._path)
        except OSError as error:
            self._tell(f"{error.strerror or error}")

    def _fail(self, error: Exception) -> None:
        self.is_done = True
        if self._timeline is not None:
            self._timeline.end()
        with suppress(Exception):  # the first error is the one to tell
            if self._profile is not None and self._timeline is not None:
                self._profile.stop_trace()
        self._profile = None
        self._tell(f"{type(error).__name__}: {error}")

    def _tell(self, why: str) -> None:
        """In an event, and in a file where ``closeranks profile`` looks for the trace."""
        with suppress(OSError):
            failure_file(self._path, self._identity.request).write_text(why)
        self._on_problem(f"the trace {self._path} was not written: {why}")


def _check_free() -> None:
    """torch has one profiler in a process: a second one would end the user's."""
    if torch._C._autograd._profiler_enabled():
        raise RuntimeError("another profiler is recording in this process")
