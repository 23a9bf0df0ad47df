"""Records a torch profiler trace of a few chosen steps.

Invariant: outside its step range a profiler costs two comparisons a step; a trace appears whole or not at all; a
failure to write one is a warning and does not end the run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from closeranks.core.events import Event, Warned
from closeranks.telemetry.run_log.run_folder import RunFolder
from closeranks.telemetry.step_range import NO_STEPS, StepRange, parse_step_range

__all__ = ["StepProfiler", "StepRange", "parse_step_range"]


class StepProfiler:
    """Writes ``RUN/traces/rank-00000.json.gz``, which chrome://tracing and Perfetto open.

    Call sequence, on every rank: ``step_begin(n)`` and ``step_end(n)`` around each step, numbered as ``StepDone``
    reports them (the first is 1); ``close`` once, which writes what there is if the run ended inside the range.
    """

    def __init__(
        self, step_range: StepRange, folder: Path, rank: int, emit: Callable[[Event], None] = lambda event: None
    ) -> None:
        self._step_range = step_range
        self._emit = emit
        self._path = RunFolder(folder).trace(rank)
        self._profile: profile | None = None
        self._mark: record_function | None = None

    @classmethod
    def of(cls, steps: str, folder: Path, rank: int, emit: Callable[[Event], None]) -> Self:
        """A profiler for the steps that a job names, if any."""
        return cls(parse_step_range(steps) or NO_STEPS, folder, rank, emit)

    @property
    def steps(self) -> tuple[int, int]:
        """The first and the last."""
        return self._step_range.first, self._step_range.last

    def step_begin(self, step: int) -> None:
        if step not in self._step_range:
            return
        if self._profile is None:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities, acc_events=True)
            self._profile.start()
        self._mark = record_function(f"step {step}")
        self._mark.__enter__()

    def step_end(self, step: int) -> None:
        if step not in self._step_range or self._mark is None:
            return
        self._mark.__exit__(None, None, None)
        self._mark = None
        if step == self._step_range.last:
            self.close()

    def close(self) -> None:
        """Write the trace, if one is being recorded. May be called again."""
        if self._profile is None:
            return
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None
        taken, self._profile = self._profile, None
        taken.stop()
        unfinished = self._path.with_name(f".{self._path.name}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            taken.export_chrome_trace(str(unfinished))
            unfinished.replace(self._path)
        except OSError as error:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            self._emit(Warned(f"the trace {self._path} was not written: {error.strerror or error}"))
