"""Draws a layout as one picture: the mesh of ranks, and below it the pipeline's schedule.

Ranks of one colour compute with the same weights: the hue is the pipeline rank, the lightness the tensor rank; the
stripe at a cell's edge is the shard of the state that the rank keeps. Invariant: matplotlib is imported only when a
picture is drawn, and the picture of a mesh too large to be legible says what it leaves out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from closeranks.facts.mesh import Mesh, MeshCoordinate
from closeranks.facts.pipeline.schedules import schedule_for
from closeranks.facts.pipeline.timeline import timeline
from closeranks.plan.layout_text import ByteUnit, byte_unit_for
from closeranks.plan.layouts import LayoutCost, RankCost
from closeranks.plan.mesh_text import unit_names
from closeranks.plan.schedule_picture import draw_schedule

_INK = "#1f2933"
_QUIET = "#7b8794"
_DPI = 160
_HUES = (0.585, 0.075, 0.41, 0.94, 0.74, 0.14, 0.5, 0.02)
"""Blue, orange, green, rose, violet, ochre, teal, red: neighbours on the pipeline differ most."""

_MAX_ROWS = 32
_MAX_COLUMNS = 16
_MAX_PANELS = 32


@dataclass(frozen=True, slots=True)
class _Frame:
    """Sizes in inches: panels of cells, in one or more rows."""

    num_panels: int
    num_rows: int
    """Of cells in a panel."""
    num_columns: int
    num_stages: int
    """Of a panel; each has a line of its own."""

    cell = (0.52, 0.36)
    top = 0.82
    left = 1.3
    right = 0.35
    line = 0.17
    gap = 0.45
    least = 2.4
    widest = 21.0
    foot = 0.42

    @property
    def panel(self) -> tuple[float, float]:
        return max(self.least, self.cell[0] * self.num_columns), self.cell[1] * self.num_rows

    @property
    def panel_top(self) -> float:
        """Space for the text above the cells."""
        return 0.78 + self.line * self.num_stages

    @property
    def across(self) -> int:
        """Panels in a row."""
        fitting = int((self.widest - self.left) // (self.panel[0] + self.gap))
        return max(1, min(self.num_panels, fitting))

    @property
    def total(self) -> tuple[float, float]:
        down = -(-self.num_panels // self.across)
        width = self.left + self.across * (self.panel[0] + self.gap) - self.gap + self.right
        return max(9.0, width), self.top + down * (self.panel[1] + self.panel_top) + self.foot

    def corner(self, number: int) -> tuple[float, float]:
        """The upper left corner of a panel's cells, from the figure's upper left."""
        down, across = divmod(number, self.across)
        left = self.left + across * (self.panel[0] + self.gap)
        return left, self.top + self.panel_top + down * (self.panel[1] + self.panel_top)


def draw_layout(cost: LayoutCost, path: Path) -> Path:
    """Draw a PNG of the mesh and, where there is a pipeline, its schedule."""
    from matplotlib.image import imread, imsave

    bands = [_mesh_pixels(cost)]
    if cost.layout.pipeline > 1:
        drawn_timeline = timeline(schedule_for(cost.layout.schedule, cost.layout.pipeline, cost.num_micro))
        with TemporaryDirectory() as folder:
            drawn = draw_schedule(drawn_timeline, Path(folder) / "schedule.png", f"schedule {cost.layout.schedule}")
            bands.append((imread(drawn)[..., :3] * 255).astype("uint8"))
    # Replaced atomically: a viewer that has the picture open never sees half of one.
    unfinished = path.with_name(f".{path.name}")
    imsave(unfinished, _stacked(bands), dpi=_DPI, format="png")
    return unfinished.replace(path)


def _stacked(bands: list[Any]) -> Any:
    """Pictures of any width one below the other, on white."""
    import numpy as np

    width = max(band.shape[1] for band in bands)
    margins = [((0, 0), (0, width - band.shape[1]), (0, 0)) for band in bands]
    return np.vstack([np.pad(band, margin, constant_values=255) for band, margin in zip(bands, margins, strict=True)])


def _mesh_pixels(cost: LayoutCost) -> Any:
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    _, replicas, shards, tensors = Mesh(cost.layout).sizes
    panels = cost.ranks[:_MAX_PANELS]
    frame = _Frame(len(panels), min(replicas * shards, _MAX_ROWS), min(tensors, _MAX_COLUMNS), len(panels[0].stages))
    figure = Figure(figsize=frame.total, dpi=_DPI, facecolor="white")
    canvas: Any = FigureCanvasAgg(figure)
    byte_unit = byte_unit_for([cost])
    for number, rank in enumerate(panels):
        _draw_panel(figure, frame, number, cost, rank, byte_unit)
    _draw_text(figure, frame, cost)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _draw_panel(figure: Any, frame: _Frame, number: int, cost: LayoutCost, rank: RankCost, byte_unit: ByteUnit) -> None:
    mesh, (width, height) = Mesh(cost.layout), frame.total
    _, _, shards, tensors = mesh.sizes
    left, top = frame.corner(number)
    cells = frame.cell[0] * frame.num_columns, frame.panel[1]
    axes = figure.add_axes((left / width, 1 - (top + cells[1]) / height, cells[0] / width, cells[1] / height))
    axes.set_xlim(0, frame.num_columns)
    axes.set_ylim(frame.num_rows, 0)
    axes.axis("off")
    for row in range(frame.num_rows):
        replica, shard = divmod(row, shards)
        for tensor in range(frame.num_columns):
            coordinate = MeshCoordinate(rank.pipeline, replica, shard, tensor)
            stripe = shard / max(1, shards - 1) if shards > 1 else None
            _draw_cell(axes, row, tensor, mesh.rank_of(coordinate), _color(coordinate, tensors), stripe)
        if row and shard == 0 and shards > 1:
            axes.plot([0, frame.num_columns], [row, row], color=_INK, linewidth=1.2, solid_capstyle="butt")
    _draw_labels(axes, frame, mesh, is_leftmost=number % frame.across == 0)
    _draw_title(figure, frame, (left, top), rank, byte_unit)


def _color(coordinate: MeshCoordinate, tensors: int) -> tuple[float, float, float]:
    from colorsys import hls_to_rgb

    share = coordinate.tensor / max(1, tensors - 1) if tensors > 1 else 0.3
    return hls_to_rgb(_HUES[coordinate.pipeline % len(_HUES)], 0.48 + 0.33 * share, 0.55)


def _draw_cell(axes: Any, row: int, column: int, rank: int, color: tuple[float, ...], stripe: float | None) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((column + 0.03, row + 0.05), 0.94, 0.9, facecolor=color, linewidth=0))
    if stripe is not None:
        shade = str(0.15 + 0.75 * stripe)
        axes.add_patch(Rectangle((column + 0.03, row + 0.05), 0.13, 0.9, facecolor=shade, linewidth=0))
    ink = "white" if sum(color) < 1.75 else _INK
    axes.text(column + 0.55, row + 0.53, str(rank), fontsize=9.5, color=ink, ha="center", va="center")


def _draw_labels(axes: Any, frame: _Frame, mesh: Mesh, *, is_leftmost: bool) -> None:
    _, replicas, shards, tensors = mesh.sizes
    for tensor in range(frame.num_columns if tensors > 1 else 0):
        text = f"t{tensor}" if frame.num_columns > 1 else ""
        axes.text(tensor + 0.5, -0.12, text, fontsize=7.5, color=_QUIET, ha="center", va="bottom")
    for row in range(frame.num_rows if is_leftmost else 0):
        replica, shard = divmod(row, shards)
        both = f"replica {replica}  shard {shard}" if replicas > 1 else f"shard {shard}"
        axes.text(
            -0.12,
            row + 0.53,
            both if shards > 1 else f"data {row}",
            fontsize=7.5,
            color=_QUIET,
            ha="right",
            va="center",
        )
    hidden = [f"{replicas * shards - frame.num_rows} more data ranks" if replicas * shards > frame.num_rows else ""]
    hidden.append(f"{tensors - frame.num_columns} more tensor ranks" if tensors > frame.num_columns else "")
    note = ", ".join(text for text in hidden if text)
    if note:
        axes.text(0, frame.num_rows + 0.15, f"and {note}", fontsize=7.5, color=_QUIET, ha="left", va="top")


def _draw_title(figure: Any, frame: _Frame, corner: tuple[float, float], rank: RankCost, byte_unit: ByteUnit) -> None:
    (width, height), (left, top) = frame.total, corner
    room = int((frame.panel[0] + frame.gap) / 0.062)
    stages = [f"stage {stage.number}: {unit_names(stage.units).replace('model.', '')}" for stage in rank.stages]
    lines = [*(_truncate(text, room) for text in stages), f"{byte_unit.text(rank.total_bytes)} {byte_unit.name} a rank"]
    above = 0.3 + frame.line * len(lines)
    x = left / width
    figure.text(x, 1 - (top - above) / height, f"pipeline {rank.pipeline}", fontsize=10, color=_INK, fontweight="bold")
    for number, text in enumerate(lines):
        y = 1 - (top - above + frame.line * (number + 1)) / height
        figure.text(x, y, text, fontsize=7.5, color=_QUIET)


def _truncate(text: str, room: int) -> str:
    return text if len(text) <= room else text[: room - 3] + "..."


def _draw_text(figure: Any, frame: _Frame, cost: LayoutCost) -> None:
    width, height = frame.total
    layout = cost.layout
    left = 0.35 / width
    figure.text(left, 1 - 0.3 / height, str(layout), fontsize=15, fontweight="bold", color=_INK, va="center")
    facts = [f"{layout.num_ranks} ranks", f"{cost.num_micro} micro-batches a step on each data rank"]
    facts.append("state is counted, activations are estimated")
    if len(cost.ranks) > _MAX_PANELS:
        facts.append(f"{len(cost.ranks) - _MAX_PANELS} more pipeline ranks are not drawn")
    figure.text(left, 1 - 0.58 / height, "   ·   ".join(facts), fontsize=9.5, color=_QUIET, va="center")
    words = "one colour: computes with the same weights"
    if layout.tensor > 1:
        words += "   ·   lightness: the tensor rank (t)"
    if Mesh(layout).sizes[2] > 1:
        words += "   ·   stripe: the shard of the state that a rank keeps"
    figure.text(left, 0.2 / height, words, fontsize=8.5, color=_QUIET, va="center")
