"""Formats scaling curves and levers as table rows, sentences and JSON. Pure: curves in, text out.

Invariant: a number of devices on which nothing fits is shown as such, never left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from closeranks.plan.scaling.levers import Lever
from closeranks.plan.scaling.scaling import ScaleCurve, ScalePoint
from closeranks.plan.search.plan_json import plan_json
from closeranks.plan.search.plan_text import Rows, count_text, gib_text, layout_text, percent, seconds_text

TITLES = {"strong": "Strong scaling: the same global batch", "weak": "Weak scaling: the batch grows with the devices"}
_HEADINGS = (
    "devices", "batch", "layout", "micro", "recompute", "step", "tokens/s", "efficiency", "MFU", "communication",
    "bubble", "memory",
)  # fmt: skip
DROPPABLE = ("memory", "recompute", "micro", "batch")


def curve_rows(curve: ScaleCurve, seq_len: int) -> Rows:
    return [_HEADINGS, *(_row(curve, point, seq_len) for point in curve.points)]


def _row(curve: ScaleCurve, point: ScalePoint, seq_len: int) -> tuple[str, ...]:
    plan, count, batch = point.plan, f"{point.num_devices:,}", f"{point.global_batch:,}"
    if plan is None:
        closest = point.result.closest
        what = f"nothing fits: misses by {gib_text(closest.memory.missing_bytes)}" if closest else "nothing is legal"
        return (count, batch, what, *["-"] * (len(_HEADINGS) - 3))
    return (
        count,
        batch,
        layout_text(plan.choice),
        str(plan.choice.micro_batch),
        plan.choice.recompute,
        seconds_text(plan.step.seconds),
        count_text(point.global_batch * seq_len / plan.step.seconds),
        percent(curve.efficiency(point) or 0.0),
        percent(plan.step.mfu),
        percent(point.communication),
        percent(point.bubble),
        gib_text(plan.memory.total_bytes),
    )


def takes_over_text(curve: ScaleCurve) -> str:
    """Where communication (and the bubble) begins to count, and where it takes over."""
    tenth, half = curve.takes_over(0.1), curve.takes_over(0.5)
    last = next((point for point in reversed(curve.points) if point.plan is not None), None)
    if last is None:
        return "Nothing fits on any of these."
    if tenth is None:
        share = percent(last.communication + last.bubble)
        return (
            f"Communication never takes over: at {last.num_devices:,} devices it and the bubble take {share or '0%'}."
        )
    text = f"Communication and bubble take more than a tenth of a step from {tenth.num_devices:,} devices on"
    return f"{text}, and more than half from {half.num_devices:,} on." if half else f"{text}, and never half of it."


def lever_rows(found: Sequence[Lever]) -> Rows:
    rows: Rows = [("lever", "tokens/s", "what")]
    return rows + [(lever.name, f"{100 * lever.gain:+.1f}%", lever.what) for lever in found]


def scale_json(curves: Sequence[ScaleCurve], found: Sequence[Lever], seq_len: int) -> dict[str, Any]:
    return {
        **{curve.kind: [_point_json(curve, point, seq_len) for point in curve.points] for curve in curves},
        "takes_over": {curve.kind: takes_over_text(curve) for curve in curves},
        "levers": [{"name": lever.name, "gain": lever.gain, "what": lever.what} for lever in found],
    }


def _point_json(curve: ScaleCurve, point: ScalePoint, seq_len: int) -> dict[str, Any]:
    plan = point.plan
    found: dict[str, Any] = {"num_devices": point.num_devices, "global_batch": point.global_batch}
    if plan is None:
        return {**found, "plan": None}
    return {
        **found,
        "tokens_per_s": point.global_batch * seq_len / plan.step.seconds,
        "efficiency": curve.efficiency(point),
        "communication": point.communication,
        "bubble": point.bubble,
        "plan": plan_json(plan),
    }
