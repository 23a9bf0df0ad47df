"""Writes the scalars of a run to TensorBoard.

Invariant: the same scalars that the metrics file holds, under the step they belong to; a run that went back to an
earlier step makes TensorBoard discard what came after it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from closeranks.core.events import Evaluated, Event, RunStarted, StepDone, Warned
from closeranks.telemetry.run_log.run_folder import RunFolder
from closeranks.telemetry.sinks.metrics import Rates, values_of
from closeranks.telemetry.sinks.sink import SINKS, MissingPackageError, SinkContext

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


_RETRY_S = 5.0
"""How often opening a new file is tried after a failure."""
_ROOM_BYTES = 1 << 16
_SHOWN = frozenset(
    {
        *("train/loss", "train/lr", "train/grad_norm", "train/metric", "train/items_per_s", "train/mfu"),
        *("eval/loss", "eval/metric"),
    }
)
"""What curves are drawn of. The other metrics would cost more than these at every step."""


class TensorBoardSink:
    """Writes to ``RUN/tensorboard``.

    A write failure is reported once through ``emit`` and its scalars are left out; a new file is opened as soon as
    possible.
    """

    name = "telemetry.tensorboard"
    fix = ""

    def __init__(self, folder: Path, emit: Callable[[Event], None] = lambda event: None) -> None:
        self._emit = emit
        self._has_warned = False
        self._folder = RunFolder(folder).tensorboard
        self._retry_at: float | None = None
        """When to try again after a failure."""
        self._rates = Rates()
        self._writer: SummaryWriter | None = None

    def open(self) -> None:
        _quiet_threads()
        self._open = partial(_writer_class(), log_dir=str(self._folder), flush_secs=10)

    def handle(self, events: Sequence[Event]) -> None:
        for event in events:
            rates = self._rates.observe(event)
            if self._retry_at is not None and time.monotonic() < self._retry_at:
                continue
            try:
                if self._retry_at is not None:
                    self._check_free_space()
                if isinstance(event, RunStarted):
                    self._begin(event)
                if isinstance(event, StepDone | Evaluated):
                    for one in (*values_of(event), *rates):
                        if one.name in _SHOWN:
                            self._scalar(one.path, one.value, event.step)
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

    def close(self) -> None:
        writer, self._writer = self._writer, None
        try:
            if writer is not None:
                writer.close()
        except OSError as error:
            self._handle_error(error)

    def _begin(self, started: RunStarted) -> None:
        self.close()
        is_again = started.first_step > 0 or started.generation > 0
        self._writer = self._open(purge_step=started.first_step + 1 if is_again else None)

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
        raise MissingPackageError(TensorBoardSink.name, "tensorboard") from error
    return SummaryWriter


@SINKS.register("tensorboard")
def _make(context: SinkContext) -> TensorBoardSink:
    return TensorBoardSink(context.folder, context.emit)
