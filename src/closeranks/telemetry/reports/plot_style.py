"""What the pictures of a report have in common: colours, axes without a frame, and how they are saved.

Invariants: matplotlib is imported only when a picture is drawn (it takes a good part of a second), and without pyplot,
which would keep global state; a viewer that has a picture open never sees half of one.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

INK = "#1f2933"
GRAY = "#7b8794"
PALE = "#c3cbd4"
GRID = "#e6eaef"
BLUE = "#2563a8"
LIGHT_BLUE = "#7aa6d8"
ORANGE = "#e07b28"
GREEN = "#2f855a"
PURPLE = "#7c4d9e"
RED = "#c53030"
YELLOW = "#c9a227"
SMALL = 8.5


def new_figure(height: float) -> Any:
    """``height`` in inches; all pictures are as wide."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, height))
    FigureCanvasAgg(figure)
    return figure


def tidy(axes: Any, title: str, value: str = "", color: str = INK) -> None:
    """No frame; the quantity on the left above the axes, its value on the right."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(PALE)
    axes.tick_params(colors=GRAY, labelsize=SMALL, length=3, which="both")
    set_title(axes, title, value, color)


def set_title(axes: Any, text: str, value: str = "", color: str = INK) -> None:
    # With parse_math, what stands between two amounts of dollars would be set as a formula.
    axes.set_title(text, loc="left", fontsize=10, color=color, fontweight="bold", pad=7, parse_math=False)
    axes.set_title(value, loc="right", fontsize=9.5, color=GRAY, pad=7, parse_math=False)


def save_figure(figure: Any, path: Path) -> Path:
    """Replace the picture as a whole."""
    unfinished = path.with_name(f".{path.name}")
    try:
        figure.savefig(unfinished, dpi=160, facecolor="white", format="png")
        return unfinished.replace(path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
