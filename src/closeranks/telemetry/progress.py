"""What does a person see while a run goes on?

On a terminal one live line; elsewhere calm plain lines every ``log_every`` steps, without colours or carriage returns.
Invariants: no thread (its process forks workers), at most ten redraws a second, and the last step's line always stands
at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from closeranks.core.events import Evaluated, Event, Resumed, RunEnded, RunStarted, Saved, SaveFailed, StepDone, Warned
from closeranks.telemetry import lines
from closeranks.telemetry.meter import Meter, Reading

_REDRAW_S = 0.1
_BAR_COLUMNS = 24
_BAR_LEAST = 8


class Progress:
    """Call sequence: ``handle`` each event of rank 0 in order, ``note`` anything else worth a line, ``close`` once.

    A context manager too, so that a terminal gets its cursor back whatever happens.
    """

    def __init__(
        self, console: Console | None = None, *, log_every: int = 10, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console if console is not None else Console()
        self._log_every = log_every
        self._clock = clock
        self._live: Live | None = None
        self._drawn_at = -_REDRAW_S
        self._started = RunStarted()
        self._meter = Meter(self._started)
        self._num_skipped = 0
        self._latest: tuple[StepDone, Reading] | None = None
        self._is_latest_shown = True

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def handle(self, event: Event) -> None:
        """Show an event; kinds that no person needs are passed over."""
        match event:
            case RunStarted(rank=0):
                self._begin(event)
            case StepDone():
                self._step(event)
            case Evaluated():
                self._show_latest()
                self._meter.pause(event.seconds)
                self.note(lines.evaluated_line(event))
            case Saved():
                self._show_latest()
                self._meter.pause(event.stall_s)
                self.note(lines.saved_line(event), style="dim")
            case SaveFailed():
                self._show_latest()
                self.note(lines.save_failed_line(event), style="bold red")
            case Resumed():
                self.note(lines.resumed_line(event))
            case Warned():
                self.note(lines.warned_line(event), style="yellow")
            case RunEnded():
                self._end(event)

    def note(self, text: str, *, style: str = "") -> None:
        """A line that stays, above the live one."""
        self._console.print(Text(text, style=style), soft_wrap=True)

    def close(self) -> None:
        """Leave the last step's line standing and hand the terminal back. May be called again."""
        self._show_latest()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _begin(self, started: RunStarted) -> None:
        self._started = started
        self._meter = Meter(started)
        self.note(lines.started_line(started))

    def _step(self, done: StepDone) -> None:
        self._latest = (done, self._meter.observe(done))
        self._is_latest_shown = False
        if not done.taken:
            self._num_skipped += 1
            if lines.is_worth_a_line(self._num_skipped):
                self.note(lines.skipped_line(self._started, done, self._num_skipped), style="yellow")
        if self._is_due(done):
            self._show_latest()

    def _end(self, event: RunEnded) -> None:
        self.close()
        self.note(lines.ended_line(event))

    def _is_due(self, done: StepDone) -> bool:
        if done.step in (self._started.first_step + 1, self._started.last_step):
            return True
        if self._console.is_interactive:
            return self._clock() - self._drawn_at >= _REDRAW_S
        return done.step % self._log_every == 0

    def _show_latest(self) -> None:
        if self._is_latest_shown or self._latest is None:
            return
        self._is_latest_shown = True
        done, reading = self._latest
        is_live = self._console.is_interactive
        fields = lines.step_fields(self._started, done, reading, num_skipped=self._num_skipped, detail=not is_live)
        if is_live:
            self._draw(_live_line(fields, done.step, self._started.last_step, self._console.width - 1))
        else:
            self.note(lines.join(fields))

    def _draw(self, line: RenderableType) -> None:
        if self._live is None:
            self._live = Live(line, console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(line, refresh=True)
        self._drawn_at = self._clock()


def _live_line(fields: Sequence[lines.Field], step: int, last_step: int, width: int) -> RenderableType:
    """One row: the fields that fit, and a slim bar in what room is left."""
    kept = lines.fit(fields, width)
    text = Text(no_wrap=True, overflow="ellipsis")
    for place, field in enumerate(kept):
        text.append(field.gap if place else "")
        text.append(f"{field.label} " if field.label else "", style="dim")
        text.append(field.value, style="bold" if field.label == "loss" else "")
    row = Table.grid(padding=(0, 2))
    room = width - text.cell_len - 2
    if last_step and room >= _BAR_LEAST:
        bar = ProgressBar(
            total=last_step,
            completed=step,
            width=min(room, _BAR_COLUMNS),
            style="bright_black",
            complete_style="cyan",
            finished_style="green",
        )
        row.add_row(text, bar)
    else:
        row.add_row(text)
    return row
