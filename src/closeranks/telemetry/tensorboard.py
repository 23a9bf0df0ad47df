"""Writes the scalars of a run to TensorBoard.

Invariant: the same scalars that the metrics file holds, under the step they belong to; a run that went back to an
earlier step makes TensorBoard discard what came after it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from closeranks.core.errors import SetupError
from closeranks.core.events import Evaluated, Event, RunStarted, StepDone, Warned
from closeranks.telemetry.live.throughput import ThroughputMeter
from closeranks.telemetry.run_log.run_folder import RunFolder

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


_RETRY_S = 5.0
"""How often opening a new file is tried after a failure."""
_ROOM_BYTES = 1 << 16


class TensorBoardSink:
    """Writes to ``RUN/tensorboard``. Call sequence: ``handle`` each event of rank 0, ``close`` once.

    A write failure is reported once through ``emit`` and its scalars are left out; a new file is opened as soon as
    possible.
    """

    def __init__(self, folder: Path, emit: Callable[[Event], None] = lambda event: None) -> None:
        self._emit = emit
        _quiet_threads()
        self._has_warned = False
        self._folder = RunFolder(folder).tensorboard
        self._retry_at: float | None = None
        """When to try again after a failure."""
        self._open = partial(_writer_class(), log_dir=str(self._folder), flush_secs=10)
        self._meter = ThroughputMeter(RunStarted())
        self._writer: SummaryWriter | None = None

    def handle(self, event: Event) -> None:
        if self._retry_at is not None and time.monotonic() < self._retry_at:
            return
        try:
            if self._retry_at is not None:
                self._check_free_space()
            self._write(event)
            self._retry_at = None
        except OSError as error:
            self._handle_error(error)

    def _handle_error(self, error: OSError) -> None:
        """Drop the writer: it keeps what it could not write, and would fail on it for ever."""
        self._writer, self._retry_at = None, time.monotonic() + _RETRY_S
        if not self._has_warned:
            self._has_warned = True
            self._emit(Warned(f"TensorBoard scalars cannot be written: {error.strerror or error}"))

    def _check_free_space(self) -> None:
        """Raises if there is no room: a writer that is opened in vain leaves an empty file each time."""
        self._folder.mkdir(parents=True, exist_ok=True)
        probe = self._folder / ".probe"
        try:
            probe.write_bytes(bytes(_ROOM_BYTES))
        finally:
            probe.unlink(missing_ok=True)

    def _write(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._begin(event)
            case StepDone():
                self._step(event)
            case Evaluated():
                self._scalar("eval/loss", event.loss, event.step)
                for name, value in event.metrics.items():
                    self._scalar(f"eval/{name}", value, event.step)

    def close(self) -> None:
        writer, self._writer = self._writer, None
        try:
            if writer is not None:
                writer.close()
        except OSError as error:
            self._handle_error(error)

    def _begin(self, started: RunStarted) -> None:
        self.close()
        self._meter = ThroughputMeter(started)
        is_again = started.first_step > 0 or started.generation > 0
        self._writer = self._open(purge_step=started.first_step + 1 if is_again else None)

    def _step(self, done: StepDone) -> None:
        reading = self._meter.observe(done)
        self._scalar("train/loss", done.loss, done.step)
        self._scalar("train/lr", done.lr, done.step)
        self._scalar("train/grad_norm", done.grad_norm, done.step)
        for name, value in done.metrics.items():
            self._scalar(f"train/{name}", value, done.step)
        if reading.items_per_s is not None:
            self._scalar("train/items_per_s", reading.items_per_s, done.step)
        if reading.mfu is not None:
            self._scalar("train/mfu", reading.mfu, done.step)

    def _scalar(self, tag: str, value: float, step: int) -> None:
        # TensorBoard draws nothing for a value that is not finite, and warns; the metrics file has it.
        if math.isfinite(value):
            self._writer = self._writer or self._open()
            self._writer.add_scalar(tag, value, step)


def _quiet_threads() -> None:
    """When a full disk ends a writer's thread, it prints a traceback and raises the error at the next write. The sink
    reports it there, so the traceback is suppressed."""
    before = threading.excepthook
    if getattr(before, "is_of_tensorboard", False):
        return

    def hook(arguments: threading.ExceptHookArgs) -> None:
        is_writer = type(arguments.thread).__name__ == "_AsyncWriterThread"
        if not (is_writer and isinstance(arguments.exc_value, OSError)):
            before(arguments)

    hook.is_of_tensorboard = True  # type: ignore[attr-defined]
    threading.excepthook = hook


def _writer_class() -> type[SummaryWriter]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        fix = "Run `pip install closeranks[track]`, or set telemetry.tensorboard = false."
        raise SetupError("telemetry.tensorboard needs the tensorboard package, which is not installed", fix) from error
    return SummaryWriter
