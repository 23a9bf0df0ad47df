"""Draws docs/design.png: floors, processes, seam and state on one page.

    python -m tests.docs.design_picture docs/design.png

Rooms are read from ``.importlinter``, phases and components from the source of ``run``. The picture carries what it was
drawn from in its description, so that a test can tell whether the code has changed since. No torch.
"""

from __future__ import annotations

import ast
import configparser
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.docs.pages import ROOT

SOURCE = ROOT / "src" / "closeranks"
PHASES = (
    "begin",
    "loaded",
    "before_forward",
    "before_backward",
    "after_backward",
    "before_vote",
    "after_vote",
    "update",
    "after_update",
    "end",
    "settled",
)
EVALUATION = ("before_evaluation", "after_evaluation")
STATE = ("tensors", "tree", "restore")
VOTE_AFTER = "before_vote"
COMPONENTS = {  # in the order of the list in run.build, then of those that a session adds
    "KeptTables": "rows of embedding tables",
    "Model": "parameters and buffers",
    "RunningStatistics": "batch norm",
    "GradientSync": "reduction, error feedback",
    "OptimizerStep": "update, moments",
    "LossScaling": "loss scale of fp16",
    "LocalSgd": "local SGD and DiLoCo",
    "ParameterServers": "votes of stale workers",
    "Ema": "moving average of weights",
    "Rebalancing": "micro-batches by speed",
    "Batches": "data, cursor, bad records",
    "GradientNoiseScale": "gradient noise scale",
    "GradientCompressionQuality": "error of compression",
    "UnusedParameters": "parameters without gradient",
    "ModelFlops": "FLOPs of your own module",
    "PhaseRecorder": "time by phase, bytes sent",
    "ResourceUse": "processors, disks, GPU",
    "MemoryRecorder": "memory by kind",
    "SessionCheckpoints": "checkpoints",
    "SessionSnapshots": "copies in memory",
    "StateCapture": "waits for both to land",
    "StepTraces": "traces on request",
}

_ROW_HEIGHT = 0.27
_WIDTH, _HEIGHT = 11.0, 11.1 + _ROW_HEIGHT * len(COMPONENTS)
_INK, _QUIET, _LINE, _PAPER = "#1f2933", "#66727f", "#c3cbd4", "#f6f8fa"
_BLUE, _GREEN, _ORANGE, _PURPLE, _RED = "#2563a8", "#2f855a", "#c2611a", "#7c4d9e", "#c53030"
_TINT = {_BLUE: "#e8f0f9", _GREEN: "#e6f4ec", _ORANGE: "#fdf0e4", _PURPLE: "#f2ebf7", _LINE: "#ffffff"}


@dataclass(frozen=True)
class Facts:
    """What the picture shows of the code."""

    floors: list[list[str]]
    """From the highest to the lowest."""
    torchless: list[str]
    components: dict[str, list[str]]
    """By class: what it overrides of the phases, and of the methods for evaluation and state."""


def read_facts() -> Facts:
    contract = configparser.ConfigParser()
    contract.read(ROOT / ".importlinter")
    layers = contract["importlinter:contract:floors"]["layers"].split("\n")
    floors = [[name for name in re.findall(r"\w+", layer) if (SOURCE / name).is_dir()] for layer in layers]
    torchless = re.findall(r"closeranks\.(\w+)", contract["importlinter:contract:torchless"]["source_modules"])
    found = overrides()
    return Facts([floor for floor in floors if floor], torchless, {name: found[name] for name in COMPONENTS})


def overrides() -> dict[str, list[str]]:
    """The components of ``run`` by class, each with what it overrides."""
    found = {}
    for path in sorted((SOURCE / "run").rglob("*.py")):
        for one in ast.parse(path.read_text()).body:
            if isinstance(one, ast.ClassDef) and "Component" in {getattr(base, "id", "") for base in one.bases}:
                methods = {method.name for method in one.body if isinstance(method, ast.FunctionDef)}
                found[one.name] = [name for name in (*PHASES, *EVALUATION, *STATE) if name in methods]
    return found


def drawn_from(picture: Path) -> str:
    """The description inside a picture."""
    from PIL import Image

    with Image.open(picture) as image:
        return str(image.info["Description"])


def described(facts: Facts) -> str:
    return json.dumps(asdict(facts))


class Sheet:
    """A page in inches, from its lower left corner."""

    def __init__(self) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self._figure = Figure(figsize=(_WIDTH, _HEIGHT))
        FigureCanvasAgg(self._figure)
        self._axes: Any = self._figure.add_axes((0, 0, 1, 1))
        self._axes.set(xlim=(0, _WIDTH), ylim=(0, _HEIGHT))
        self._axes.axis("off")

    def box(
        self, x: float, y: float, width: float, height: float, color: str = _LINE, fill: str = "", line: float = 1.2
    ) -> None:
        from matplotlib.patches import FancyBboxPatch

        style = "round,pad=0,rounding_size=0.07"
        face = fill or _TINT.get(color, "white")
        self._axes.add_patch(
            FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=face, edgecolor=color, linewidth=line)
        )

    def text(self, x: float, y: float, words: str, size: float = 9.5, color: str = _INK, **how: Any) -> None:
        self._axes.text(x, y, words, **{"fontsize": size, "color": color, "va": "center", "ha": "center"} | how)

    def named(
        self, x: float, y: float, width: float, height: float, color: str, name: str, note: str = "", size: float = 10
    ) -> None:
        """A box with its name, and below it a note of one or more lines."""
        self.box(x, y, width, height, color)
        lines = len(note.splitlines())
        middle = y + height / 2
        self.text(x + width / 2, middle + 0.085 * lines, name, size, _INK, weight="bold")
        if note:
            self.text(x + width / 2, middle - 0.1, note, 8.6, _QUIET, linespacing=1.25)

    def arrow(
        self, begin: tuple[float, float], end: tuple[float, float], color: str = _INK, style: str = "-|>", **how: Any
    ) -> None:
        from matplotlib.patches import FancyArrowPatch

        settings = {"mutation_scale": 11, "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0, "joinstyle": "miter"} | how
        self._axes.add_patch(FancyArrowPatch(begin, end, arrowstyle=style, color=color, **settings))

    def line(self, xs: Sequence[float], ys: Sequence[float], color: str = _LINE, **how: Any) -> None:
        self._axes.plot(xs, ys, color=color, **{"linewidth": 1.0, "solid_capstyle": "butt"} | how)

    def dot(self, x: float, y: float, color: str) -> None:
        self._axes.plot([x], [y], "o", color=color, markersize=8.5)

    def heading(self, x: float, y: float, title: str, words: str) -> None:
        self.text(x, y, title, 14, ha="left", weight="bold")
        self.text(x, y - 0.25, words, 9.5, _QUIET, ha="left")

    def save(self, path: Path, description: str) -> None:
        metadata = {"Description": description, "Software": None}
        self._figure.savefig(path, dpi=130, facecolor="white", format="png", metadata=metadata)


def draw_floors(sheet: Sheet, facts: Facts, x: float, top: float) -> None:
    sheet.heading(x, top, "Floors", "Imports point down, and never to a room on the same floor.")
    notes = {
        "cli": "one file per command",
        "lab": "comparisons, fault drills",
        "run": "job, session, step, components",
        "capture": "a rank's state: listed, copied, digested once",
        "facts": "arithmetic on shapes",
        "storage": "disks, object stores",
        "core": "errors, events, protocols, config",
    }
    left, width, gap, y = x + 0.3, 4.55, 0.08, top - 0.5
    for floor in facts.floors:
        columns = min(len(floor), 4)
        height = 0.47 if len(floor) <= 4 else 0.38
        for row in range(0, len(floor), columns):
            rooms = floor[row : row + columns]
            wide = (width - gap * (len(rooms) - 1)) / len(rooms)
            y -= height
            for column, room in enumerate(rooms):
                color = _GREEN if room in facts.torchless else _BLUE
                sheet.named(left + column * (wide + gap), y, wide, height, color, room, notes.get(room, ""))
            y -= gap
        y -= 0.04
    sheet.arrow((x + 0.15, top - 0.55), (x + 0.15, y + 0.14), _QUIET)
    sheet.text(x + 0.02, (top - 0.5 + y) / 2, "imports", 9, _QUIET, rotation=90)
    for place, color, words in ((0, _GREEN, "never imports torch"), (1.9, _BLUE, "may import torch")):
        sheet.box(left + place, y - 0.13, 0.22, 0.16, color)
        sheet.text(left + place + 0.32, y - 0.05, words, 8.8, _QUIET, ha="left")


def draw_processes(sheet: Sheet, x: float, top: float) -> None:
    sheet.heading(x, top, "Processes", "Workers are forked; what must outlive them belongs to the agent.")
    for left, name in ((x, "leader's host"), (x + 2.7, "every other host")):
        _draw_host(sheet, left, top, name)
    sheet.arrow((x + 2.25, top - 1.06), (x + 2.85, top - 1.06), _INK, "<|-|>")
    sheet.text(x + 2.55, top - 1.22, "control", 8.6, _INK)
    sheet.arrow((x + 2.25, top - 2.58), (x + 2.85, top - 2.58), _PURPLE, "<|-|>")
    sheet.text(x + 2.55, top - 2.72, "Gloo,\nNCCL", 8.6, _PURPLE, va="top", linespacing=1.1)
    sheet.named(x, top - 4.6, 5.1, 0.4, _ORANGE, "checkpoints: a shared folder or an object store", size=9.5)


def _draw_host(sheet: Sheet, left: float, top: float, name: str) -> None:
    first, second = left + 0.65, left + 1.75
    sheet.box(left, top - 3.93, 2.4, 3.43, _LINE, _PAPER)
    sheet.text(left + 0.12, top - 0.65, name, 9, _QUIET, ha="left")
    sheet.named(left + 0.15, top - 1.3, 2.1, 0.48, _GREEN, "agent", "starts, watches, ends workers")
    sheet.named(left + 0.15, top - 2.05, 2.1, 0.48, _BLUE, "zygote", "torch and your code, imported")
    sheet.arrow((left + 1.2, top - 1.3), (left + 1.2, top - 1.57))
    for middle, rank in ((first, "worker 0"), (second, "worker n-1")):
        sheet.arrow((middle, top - 2.05), (middle, top - 2.4))
        sheet.named(middle - 0.5, top - 2.76, 1.0, 0.36, _BLUE, rank, size=9.5)
        sheet.line([middle, middle], [top - 2.76, top - 2.96], _ORANGE, linewidth=1.4)
        sheet.arrow((middle, top - 2.96), (middle, top - 3.22), _ORANGE)
    sheet.text(left + 1.2, top - 2.22, "forks", 8.6, _INK)
    sheet.line([first, second], [top - 2.96, top - 2.96], _ORANGE, linewidth=1.4)
    sheet.named(left + 0.15, top - 3.8, 1.0, 0.58, _ORANGE, "slots", "memory of\nthe agent", 9.5)
    sheet.named(left + 1.25, top - 3.8, 1.0, 0.58, _GREEN, "writers", "one process\nper worker", 9.5)
    sheet.arrow((second, top - 3.8), (second, top - 4.2), _ORANGE)


def draw_seam(sheet: Sheet, facts: Facts, x: float, top: float) -> None:
    words = "A run is a list of components. The step calls each phase on those that override it, from top to bottom."
    sheet.heading(x, top, "Seam", words)
    first, pitch = x + 4.1, 0.47
    vote = PHASES.index(VOTE_AFTER) + 1
    places = {name: first + pitch * (index + (0.75 if index >= vote else 0)) for index, name in enumerate(PHASES)}
    beside = {"evaluation": (EVALUATION, _GREEN), "has state": (STATE, _ORANGE)}
    marks = {name: (place, {name}, _BLUE) for name, place in places.items()}
    for index, (name, (methods, color)) in enumerate(beside.items(), start=1):
        marks[name] = (places[PHASES[-1]] + 0.16 + pitch * index, set(methods), color)
    y = top - 1.45
    bottom = y - _ROW_HEIGHT * len(facts.components) - 0.02
    middle = (places[PHASES[vote - 1]] + places[PHASES[vote]]) / 2
    sheet.box(middle - 0.17, bottom, 0.34, y - bottom + 0.1, _PURPLE, line=1.0)
    sheet.text(middle, (y + bottom) / 2, "vote: one small all-reduce", 9.2, _PURPLE, rotation=90, weight="bold")
    for name, (place, _, color) in marks.items():
        ink = _INK if color == _BLUE else color
        sheet.text(place, y + 0.16, name, 9, ink, rotation=45, ha="left", va="bottom", rotation_mode="anchor")
    for name, overridden in facts.components.items():
        y -= _ROW_HEIGHT
        sheet.line([x, _WIDTH - 0.3], [y - 0.02, y - 0.02], "#e6eaef", zorder=0)
        middle_y = y + _ROW_HEIGHT / 2 - 0.02
        sheet.text(x, middle_y, name, 9.2, ha="left", family="monospace")
        sheet.text(x + 2.15, middle_y, COMPONENTS[name], 8.8, _QUIET, ha="left")
        for place, methods, color in marks.values():
            if methods & set(overridden):
                sheet.dot(place, middle_y, color)


def draw_state(sheet: Sheet, x: float, top: float) -> None:
    words = "It is listed once, and copied in one pass for recovery and for checkpoints."
    sheet.heading(x, top, "State", words)
    y, right, over = top - 2.75, x + 7.95, top - 0.8
    what = "tensors: which piece of\nwhich tensor, who else\nholds it; and a tree"
    sheet.named(x, y + 0.35, 2.1, 1.15, _BLUE, "components", what)
    how = "one copy with digests,\nduring the next forward\nand backward"
    sheet.named(x + 2.7, y + 0.35, 2.1, 1.15, _BLUE, "capture", how)
    sheet.arrow((x + 2.1, y + 0.92), (x + 2.7, y + 0.92))
    targets = (
        (y + 1.3, "own slots", "two, written in turn"),
        (y + 0.68, "peer's slots", "if no replica holds the same"),
        (y + 0.05, "save slot", "this rank's share"),
    )
    for place, name, note in targets:
        sheet.named(x + 5.4, place, 2.1, 0.5, _ORANGE, name, note, 9.5)
        sheet.arrow((x + 4.8, y + 0.92), (x + 5.4, place + 0.25), _ORANGE)
    sheet.named(right, y + 0.05, 2.45, 0.5, _ORANGE, "checkpoint", "written, then read back", 9.5)
    sheet.arrow((x + 7.5, y + 0.3), (right, y + 0.3), _ORANGE)
    for place, _, _ in targets[:2]:
        sheet.line([x + 7.5, right - 0.2], [place + 0.25, place + 0.25], _GREEN, linewidth=1.4)
    sheet.line([right - 0.2, right - 0.2], [y + 0.93, over], _GREEN, linewidth=1.4)
    sheet.line([right + 1.2, right + 1.2, x + 1.05], [y + 0.55, over, over], _GREEN, linewidth=1.4)
    sheet.arrow((x + 1.05, over), (x + 1.05, y + 1.5), _GREEN)
    back = "restore, under any layout: own slot, else a peer's, else the newest sound checkpoint"
    sheet.text(x + 1.3, over + 0.13, back, 9.2, _GREEN, ha="left")


def draw(path: Path) -> None:
    facts, sheet = read_facts(), Sheet()
    draw_floors(sheet, facts, 0.3, _HEIGHT - 0.35)
    draw_processes(sheet, 5.6, _HEIGHT - 0.35)
    draw_seam(sheet, facts, 0.3, _HEIGHT - 6.25)
    draw_state(sheet, 0.3, 2.95)
    sheet.save(path, described(facts))


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
