"""How do the pictures of curves look? Colours, and axes without a box."""

from __future__ import annotations

from typing import Any

INK = "#1f2933"
QUIET = "#7b8794"
_GRID = "#dfe4ea"


def style_axes(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=INK, pad=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("bottom", "left"):
        axes.spines[side].set_color("#c3cbd4")
    axes.grid(True, which="major", color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=QUIET, labelsize=8.5, length=3)
