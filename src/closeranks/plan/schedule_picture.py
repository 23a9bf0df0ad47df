"""Draws the timeline of a pipeline schedule, as a picture and as text for a terminal.

One row per rank: what it computes, where it waits, how much it holds. Invariant: both show the timeline as given, and
matplotlib is imported only when a picture is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from closeranks.facts.pipeline.actions import ActionKind
from closeranks.facts.pipeline.timeline import ActionSpan, Timeline, ideal_bubble, peak_in_flight

_INK = "#1f2933"
_QUIET = "#7b8794"
_GRID = "#c3cbd4"
_IDLE = "#edf0f3"
_BAR = "#9aa5b1"

_KIND_NAMES: dict[ActionKind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "gradient of inputs",
    "W": "gradient of weights",
}

_COLORS: dict[ActionKind, tuple[str, str]] = {
    "F": ("#2b6cb0", "#a9cdee"),
    "B": ("#c2601a", "#f7c79b"),
    "I": ("#b83f5e", "#f3b6c4"),
    "W": ("#2f7d5b", "#aadcc3"),
}
"""The colours of each kind on a rank's first stage and on its second."""

_TEXT = ("white", _INK)

_SMALLEST = 4.5
"""Font size in points; numbers that would be smaller are left out."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """Sizes of the picture in inches."""

    width: float
    row: float
    num_ranks: int

    left = 0.62
    right = 2.55
    top = 0.98
    bottom = 0.78

    @classmethod
    def around(cls, timeline: Timeline) -> _Frame:
        """Wide enough for a number in every box, tall enough to tell the rows apart, within what a screen shows."""
        shortest = min(span.end - span.start for spans in timeline.ranks for span in spans)
        wanted = 0.165 * timeline.makespan / shortest
        num_ranks = len(timeline.ranks)
        row = min(0.42, max(0.12, 8.0 / num_ranks))
        return cls(min(20.0, max(6.4, wanted)), row, num_ranks)

    @property
    def total(self) -> tuple[float, float]:
        return self.left + self.width + self.right, self.top + self.row * self.num_ranks + self.bottom

    def box(self, left: float, width: float) -> tuple[float, float, float, float]:
        """A part of the area of rows, as fractions of the figure; ``left`` counts from the left of that area."""
        across, down = self.total
        height = self.row * self.num_ranks
        return (self.left + left) / across, self.bottom / down, width / across, height / down


def draw_schedule(timeline: Timeline, path: Path, title: str = "") -> Path:
    """Draw a PNG: a row of boxes per rank, and beside it what the rank holds and how long it waits."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    frame = _Frame.around(timeline)
    figure = Figure(figsize=frame.total)
    FigureCanvasAgg(figure)
    rows = figure.add_axes(frame.box(0, frame.width))
    _draw_rows(rows, timeline, frame)
    makespan = timeline.makespan
    holds = figure.add_axes(frame.box(frame.width + 0.25, 0.95))
    peaks = peak_in_flight(timeline.schedule)
    _draw_bars(holds, peaks, "peak in flight", "{:.0f}", full=max(peaks))
    waits = figure.add_axes(frame.box(frame.width + 1.4, 0.95))
    _draw_bars(waits, [100 * idle / makespan for idle in timeline.idle], "waits", "{:.0f} %", full=100)
    _draw_text(figure, timeline, frame, title)
    unfinished = path.with_name(f".{path.name}")
    figure.savefig(unfinished, dpi=160, facecolor="white", format="png")
    return unfinished.replace(path)


def _draw_rows(axes: Any, timeline: Timeline, frame: _Frame) -> None:
    num_ranks, makespan = frame.num_ranks, timeline.makespan
    unit, num_digits = 72 * frame.width / makespan, len(str(timeline.schedule.num_micro - 1))
    axes.set_xlim(0, makespan)
    axes.set_ylim(num_ranks - 0.5, -0.5)
    for rank, spans in enumerate(timeline.ranks):
        axes.broken_barh([(0, makespan)], (rank - 0.42, 0.84), color=_IDLE, linewidth=0)
        shades = [_shade(timeline, rank, span) for span in spans]
        axes.broken_barh(
            [(span.start, span.end - span.start) for span in spans], (rank - 0.42, 0.84), edgecolor="white",
            facecolors=[_COLORS[span.action.kind][shade] for span, shade in zip(spans, shades, strict=True)],
            linewidth=min(0.6, 0.08 * unit),
        )  # fmt: skip
        for span, shade in zip(spans, shades, strict=True):
            size = _number_size(span, num_digits, unit, 72 * frame.row)
            if size >= _SMALLEST:
                center = (span.start + span.end) / 2, rank + 0.03
                axes.text(*center, span.action.micro, fontsize=size, color=_TEXT[shade], ha="center", va="center")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
    axes.tick_params(colors=_QUIET, labelsize=8.5, length=3)
    axes.tick_params(axis="y", length=0, labelcolor=_INK)
    every = -(-num_ranks // 32)
    axes.set_yticks(range(0, num_ranks, every), [f"rank {rank}" for rank in range(0, num_ranks, every)])


def _shade(timeline: Timeline, rank: int, span: ActionSpan) -> int:
    """Which of the two shades: a rank's first stage is dark, its second light."""
    return timeline.schedule.placement[rank].index(span.action.stage) % 2


def _number_size(span: ActionSpan, num_digits: int, unit: float, height: float) -> float:
    """Font size of a number in its box; ``unit`` and ``height`` are points per unit of time and per row."""
    return min(9.0, 0.66 * height, 0.8 * unit * (span.end - span.start) / (0.62 * num_digits))


def _draw_bars(axes: Any, values: Sequence[float], title: str, form: str, full: float) -> None:
    """A bar and a figure per rank; ``full`` is the value of a full bar."""
    positions = range(len(values))
    axes.barh(positions, [full] * len(values), height=0.5, color=_IDLE, linewidth=0)
    axes.barh(positions, values, height=0.5, color=_BAR, linewidth=0)
    size = 8.5 if len(values) <= 24 else 5.0
    for position, value in zip(positions, values, strict=True):
        axes.text(1.08 * full, position, form.format(value), fontsize=size, color=_INK, va="center")
    axes.set_ylim(len(values) - 0.5, -0.5)
    axes.set_xlim(0, 1.75 * full)
    axes.axis("off")
    axes.set_title(title, loc="left", fontsize=8.5, color=_QUIET, pad=5)


def _draw_text(figure: Any, timeline: Timeline, frame: _Frame, title: str) -> None:
    """Title and bubble above, time and colours below."""
    across, down = frame.total
    schedule = timeline.schedule
    left, right = frame.left / across, 1 - 0.3 / across
    first, second = 1 - 0.3 / down, 1 - 0.58 / down
    figure.text(left, first, title or schedule.name, fontsize=15, fontweight="bold", color=_INK, va="center")
    figure.text(left, second, "   ·   ".join(_counts(timeline)), fontsize=9.5, color=_QUIET, va="center")
    ideal = ideal_bubble(schedule.num_ranks, schedule.num_micro)
    bubble = f"bubble {100 * timeline.bubble:.1f} %"
    figure.text(right, first, bubble, fontsize=13, fontweight="bold", color=_INK, ha="right", va="center")
    compared = f"(P−1) / (M+P−1)  =  {100 * ideal:.1f} %"
    figure.text(right, second, compared, fontsize=9.5, color=_QUIET, ha="right", va="center")
    figure.legend(
        handles=_swatches(timeline), loc="lower left", bbox_to_anchor=(left, 0.04 / down), ncols=9, frameon=False,
        fontsize=8.5, labelcolor=_INK, handlelength=1.1, handleheight=1.1, columnspacing=1.6, borderaxespad=0,
    )  # fmt: skip


def _counts(timeline: Timeline) -> tuple[str, ...]:
    schedule = timeline.schedule
    return (
        _count(schedule.num_ranks, "rank"),
        _count(schedule.num_stages, "stage"),
        _count(schedule.num_micro, "micro-batch", "es"),
        f"{timeline.makespan:g} units of time",
    )


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural if number != 1 else ''}"


def _swatches(timeline: Timeline) -> list[Any]:
    from matplotlib.patches import Patch

    kinds = {span.action.kind for spans in timeline.ranks for span in spans}
    has_two = max(map(len, timeline.schedule.placement)) > 1
    swatches = [Patch(facecolor=_COLORS[kind][0], label=name) for kind, name in _KIND_NAMES.items() if kind in kinds]
    swatches += [Patch(facecolor=_COLORS["F"][1], label="light: a rank's second stage")] if has_two else []
    return [*swatches, Patch(facecolor=_IDLE, label="waits")]


def schedule_text(timeline: Timeline, width: int = 160) -> str:
    """The picture as text: ``F3`` is the forward of micro-batch 3, lower case a rank's second stage, dots a wait.

    If ``width`` columns are too few for the numbers, these are left out, and a row that is still too long is cut off.
    """
    schedule, makespan = timeline.schedule, timeline.makespan
    unit = min(span.end - span.start for spans in timeline.ranks for span in spans)
    labels = [f"rank {rank}" for rank in range(schedule.num_ranks)]
    sides = [
        f"holds {peak}, waits {100 * idle / makespan:.0f}%"
        for peak, idle in zip(peak_in_flight(schedule), timeline.idle, strict=True)
    ]
    room = width - len(labels[-1]) - max(map(len, sides)) - 4
    cell = 2 + len(str(schedule.num_micro - 1))
    cell = cell if cell * round(makespan / unit) <= room else 1
    lines = [f"{schedule.name}: {', '.join(_counts(timeline))}"]
    for rank, (label, side) in enumerate(zip(labels, sides, strict=True)):
        row = _text_row(timeline, rank, unit, cell)
        row = row if len(row) <= room else row[: room - 3] + "..."
        lines.append(f"{label:<{len(labels[-1])}}  {row}  {side}")
    ideal = ideal_bubble(schedule.num_ranks, schedule.num_micro)
    return "\n".join([*lines, f"bubble {100 * timeline.bubble:.1f}%, (P-1)/(M+P-1) = {100 * ideal:.1f}%"])


def _text_row(timeline: Timeline, rank: int, unit: float, cell: int) -> str:
    """One rank: ``cell`` columns per unit of time; with one column there is room for the kind alone."""
    text = ("." + " " * (cell - 1)) * round(timeline.makespan / unit)
    for span in timeline.ranks[rank]:
        kind = span.action.kind.lower() if _shade(timeline, rank, span) else span.action.kind
        first, last = cell * round(span.start / unit), cell * round(span.end / unit)
        box = f"{kind}{span.action.micro}".ljust(last - first - 1, "-") + " " if cell > 1 else kind * (last - first)
        text = text[:first] + box + text[last:]
    return text
