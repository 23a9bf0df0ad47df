"""How do the pictures of curves look? Colours, axes without a box, and ticks at round numbers.

Invariant: a picture appears under its name whole or not at all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

INK = "#1f2933"
QUIET = "#7b8794"
_GRID = "#dfe4ea"
_DPI = 130
_WIDE = 5.0
"""Ranges of a logarithmic axis above this factor have ticks at 1, 2, 5, 10, ..."""


def style_axes(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=INK, pad=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("bottom", "left"):
        axes.spines[side].set_color("#c3cbd4")
    axes.grid(True, which="major", color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=QUIET, labelsize=8.5, length=3)


def round_ticks(axis: Any, low: float, high: float) -> None:
    """Ticks of a logarithmic axis over values from ``low`` to ``high``, at round numbers and with no more between."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    is_wide = high > _WIDE * low
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)) if is_wide else MaxNLocator(5))
    axis.set_minor_locator(NullLocator())


def new_figure(title: str, size: tuple[float, float]) -> Any:
    """A figure that makes room for labels and legends."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    engine: Any = figure.get_layout_engine()
    engine.set(w_pad=0.12, h_pad=0.08)
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold", color=INK)
    return figure


def legend_below(axes: Any, handles: Any, columns: int) -> None:
    """Fills axes that stand below others with a legend."""
    axes.axis("off")
    axes.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.0, ncols=columns, frameon=False,
        fontsize=8, labelcolor=INK, handlelength=1.0, columnspacing=1.2,
    )  # fmt: skip


def save_png(figure: Any, path: Path) -> Path:
    unfinished = path.with_name(f".{path.name}")
    figure.savefig(unfinished, dpi=_DPI, facecolor="white", format="png")
    return unfinished.replace(path)
