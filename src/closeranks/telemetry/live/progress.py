"""Displays a run while it trains.

On a terminal one live line; elsewhere plain lines every ``log_every`` steps, without colours or carriage returns.
Invariants: no thread (its process forks workers), at most ten redraws a second, and the last step's line is always left
at the end. A run of several generations is shown as one run: it is introduced once, its speed and remaining time
survive a fault, and the last message of a generation (that it failed, say) is the end of the run only if no other
generation follows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from closeranks.core.events import (
    Evaluated,
    Event,
    FlopsCounted,
    HostChanged,
    NoiseSeen,
    PushesDropped,
    RankLost,
    RanksClosed,
    Restored,
    Resumed,
    RunEnded,
    RunStarted,
    Saved,
    SaveFailed,
    SharesChanged,
    SlowRank,
    Snapshotting,
    Standstill,
    StepDone,
    Warned,
)
from closeranks.core.system.process_age import process_age_s
from closeranks.facts.prices import PriceTable, load_prices
from closeranks.telemetry.goodput.run_cost import CostClock
from closeranks.telemetry.live import event_lines
from closeranks.telemetry.live.throughput import MeterReading, ThroughputMeter
from closeranks.telemetry.run_log.run_history import REGROUPED

_REDRAW_S = 0.1
_BAR_COLUMNS = 24
_BAR_LEAST = 8


class ProgressDisplay:
    """Call sequence: ``handle`` each event of rank 0 and of the agent in order, ``print_line`` for other messages,
    ``close`` once.

    Also a context manager, so that a terminal gets its cursor back whatever happens.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        log_every: int = 10,
        clock: Callable[[], float] = time.monotonic,
        prices: PriceTable | None = None,
    ) -> None:
        self._console = console if console is not None else Console()
        self._log_every = log_every
        self._prices = prices if prices is not None else load_prices()
        self._cost: CostClock | None = None
        """None if the device has no price."""
        self._clock = clock
        self._live: Live | None = None
        self._drawn_at = -_REDRAW_S
        self._started = RunStarted()
        self._meter = ThroughputMeter(self._started)
        self._began_at: float | None = None
        """None until the run is introduced."""
        self._skipped: set[int] = set()
        self._latest: tuple[StepDone, MeterReading] | None = None
        self._is_latest_shown = True
        self._lost: RankLost | None = None
        """The lost rank, while recovery is under way."""
        self._num_before = 0
        self._failed: RunEnded | None = None
        """How the last generation failed: the end of the run, unless another generation takes over."""
        self._shown_warnings: set[str] = set()
        self._snapshotting: Snapshotting | None = None
        self._noise_shown: float | None = None

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def handle(self, event: Event) -> None:
        """Show an event; kinds that are not meant for people are ignored."""
        match event:
            case RunStarted(rank=0):
                self._begin(event)
            case StepDone():
                self._step(event)
            case Evaluated():
                self._meter.pause(event.seconds)
                self._print_event(event_lines.evaluated_line(event))
            case Saved():
                self._meter.pause(event.stall_s)
                self._print_event(event_lines.saved_line(event), style="dim")
            case SaveFailed():
                self._print_event(event_lines.save_failed_line(event), style="bold red")
            case NoiseSeen():
                self._show_noise(event)
            case FlopsCounted():
                self._meter.note_flops(event)
                self._print_event(event_lines.flops_line(self._started, event))
            case Resumed():
                self.print_line(event_lines.resumed_line(event))
            case Warned():
                self._warn(event)
            case RunEnded():
                self._end(event)
            case _:
                self._handle_fault(event)

    def _handle_fault(self, event: Event) -> None:
        match event:
            case RankLost():
                self._show_lost(event)
            case RanksClosed():
                self._show_closed(event)
            case Restored():
                self._restore(event)
            case Snapshotting():
                self._show_snapshotting(event)
            case PushesDropped() if any(event.dropped):
                self._print_event(event_lines.dropped_line(event))
            case SharesChanged():
                self._print_event(event_lines.shares_line(event))
            case SlowRank():
                self._print_event(event_lines.slow_line(event), style="yellow")
            case Standstill():
                self._print_event("\n".join(event_lines.standstill_lines(event)), style="yellow")
            case HostChanged():
                gone = event.change in ("lost", "quarantined")
                self._print_event(event_lines.host_line(event), style="yellow" if gone else "")

    def print_line(self, text: str, *, style: str = "") -> None:
        """Print a permanent line, above the live one."""
        self._console.print(Text(text, style=style), soft_wrap=True)

    def print_output(self, text: str) -> None:
        """Output of a worker. If there is no live line to print it above, it is written as it is: rich takes a second
        to lay out each MiB, during which no messages from the workers are processed."""
        if self._live is not None:
            self.print_line(text)
            return
        self._console.file.write(f"{text}\n")
        self._console.file.flush()

    def close(self) -> None:
        """Leave the last step's line on the screen and release the terminal. May be called again."""
        self._show_latest()
        self._print_lost()
        if self._live is not None:
            self._live.stop()
            self._live = None
        failed, self._failed = self._failed, None
        if failed is not None:
            self.print_line(event_lines.ended_line(failed))

    def _print_event(self, text: str, *, style: str = "") -> None:
        """Print a line that belongs after the latest step's."""
        self._show_latest()
        self.print_line(text, style=style)

    def _begin(self, started: RunStarted) -> None:
        self._failed = None
        self._skipped = {step for step in self._skipped if step <= started.first_step}
        if started.generation and self._began_at is not None:  # the same run continues, in other processes
            whole = replace(started, first_step=self._started.first_step)
            self._started = whole
            self._meter.start_generation(whole)
            if self._cost is not None:
                self._cost.resize(whole.world_size)
            return
        self._started = started
        self._meter = ThroughputMeter(started)
        self._began_at = self._clock()
        # The age of this process, the agent or rank 0: the workers have been paid for since it was started.
        price, paid_from = self._prices.price_of(started.device), self._began_at - process_age_s()
        self._cost = CostClock(price, started.world_size, paid_from, self._clock) if price is not None else None
        self.print_line(event_lines.started_line(started))
        if started.sync:
            self.print_line(started.sync)
        if started.rate:
            self.print_line(started.rate)
        if shown := event_lines.buckets_line(started):
            self.print_line(shown)

    def _step(self, done: StepDone) -> None:
        reading = self._meter.observe(done)
        self._latest = (done, reading if self._cost is None else replace(reading, cost=self._cost.words()))
        self._is_latest_shown = False
        if not done.taken:
            self._skipped.add(done.step)
            if event_lines.is_logged(len(self._skipped)):
                self.print_line(event_lines.skipped_line(self._started, done, len(self._skipped)), style="yellow")
        if self._is_due(done):
            self._show_latest()

    def _warn(self, event: Warned) -> None:
        """Every generation repeats the warnings of its start; each is shown once."""
        text = event_lines.warned_line(event)
        if event.step is None and self._started.generation and text in self._shown_warnings:
            return
        self._shown_warnings.add(text)
        self.print_line(text, style="yellow")

    def _show_noise(self, event: NoiseSeen) -> None:
        """Shown only if it is news: the scale moved by a third, or by a tenth if that changes the verdict."""
        scale, shown = event.noise_scale, self._noise_shown
        if scale is None:
            return
        if shown is not None:
            margin = 0.9 if (scale > event.batch) != (shown > event.batch) else 0.75
            if margin * shown < scale < shown / margin:
                return
        self._noise_shown = scale
        self._print_event(event_lines.noise_line(event))

    def _show_snapshotting(self, event: Snapshotting) -> None:
        last, self._snapshotting = self._snapshotting, event
        if last is None or (last.every, last.copies) != (event.every, event.copies):
            self.print_line(event_lines.snapshots_line(event), style="dim")

    def _show_lost(self, event: RankLost) -> None:
        self._failed = None
        self._print_lost()  # another rank was lost during recovery: the first gets a line of its own
        self._lost, self._num_before = event, self._num_before or self._started.world_size
        self._draw_recovery(event_lines.closing_line(event))

    def _restore(self, event: Restored) -> None:
        """The state normally comes from memory: only another source, or a corrupt copy, is worth a line."""
        if event.source not in ("memory", "peer"):
            self._print_event(event_lines.restored_line(event), style="yellow")
        elif self._lost is not None:
            self._draw_recovery(f"{event_lines.closing_line(self._lost)} {event_lines.restored_line(event)}")
        for text in event.notes:
            self.print_line(f"warning: {text}", style="yellow")

    def _show_closed(self, event: RanksClosed) -> None:
        lost, self._lost = self._lost, None
        num_before, self._num_before = self._num_before, 0
        if lost is not None:
            self._meter.lose(lost.detected_s + event.seconds)
            self.print_line(event_lines.closed_line(lost, event, num_before or event.world_size), style="bold")
            if self._console.is_interactive:
                self._is_latest_shown = False
                self._show_latest()  # over the live line, which showed the recovery

    def _print_lost(self) -> None:
        """Print a line for a lost rank if recovery did not complete after it."""
        lost, self._lost = self._lost, None
        if lost is not None:
            self.print_line(event_lines.lost_words(lost), style="bold")

    def _draw_recovery(self, text: str) -> None:
        if self._console.is_interactive:
            self._draw(Text(text, style="bold yellow", no_wrap=True, overflow="ellipsis"))

    def _end(self, event: RunEnded) -> None:
        if event.reason == REGROUPED:
            return
        if event.reason == "failed":
            self._failed = event
            return
        self.close()
        if self._started.generation and self._began_at is not None:  # a generation knows only its own time
            event = replace(event, seconds=max(event.seconds, self._clock() - self._began_at))
        self.print_line(event_lines.ended_line(event))

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
        fields = event_lines.step_fields(
            self._started, done, reading, num_skipped=len(self._skipped), detail=not is_live
        )
        if is_live:
            self._draw(_live_line(fields, done.step, self._started.last_step, self._console.width - 1))
        else:
            self.print_line(event_lines.join(fields))

    def _draw(self, line: RenderableType) -> None:
        if self._live is None:
            self._live = Live(line, console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(line, refresh=True)
        self._drawn_at = self._clock()


def _live_line(fields: Sequence[event_lines.LineField], step: int, last_step: int, width: int) -> RenderableType:
    """One row: the fields that fit, and a slim bar in what room is left."""
    kept = event_lines.fit(fields, width)
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
