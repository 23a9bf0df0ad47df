"""How does a run appear in TensorBoard?

Invariant: the same scalars that the metrics file holds, under the step they belong to; a run that went back to an
earlier step tells TensorBoard to forget what came after it.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from closeranks.core.errors import SetupError
from closeranks.core.events import Evaluated, Event, RunStarted, StepDone
from closeranks.telemetry.folder import RunFolder
from closeranks.telemetry.meter import Meter

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardSink:
    """Writes to ``RUN/tensorboard``. Call sequence: ``handle`` each event of rank 0, ``close`` once."""

    def __init__(self, folder: Path) -> None:
        self._open = partial(_writer_class(), log_dir=str(RunFolder(folder).tensorboard), flush_secs=10)
        self._meter = Meter(RunStarted())
        self._writer: SummaryWriter | None = None

    def handle(self, event: Event) -> None:
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
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _begin(self, started: RunStarted) -> None:
        self.close()
        self._meter = Meter(started)
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


def _writer_class() -> type[SummaryWriter]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        fix = "Run `pip install closeranks[track]`, or set telemetry.tensorboard = false."
        raise SetupError("telemetry.tensorboard needs the tensorboard package, which is not installed", fix) from error
    return SummaryWriter
