"""Writes the page of one soak run in Markdown, worded as docs/soak.md; the plot lies beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from soak_figures import Cost

_TITLES = {"light": "The light mix", "all": "The mix of all kinds"}


def write_page(path: Path, figures: Mapping[str, Any], found: Sequence[Cost], mix: str, goal: float) -> None:
    blocks = [
        f"# {_TITLES[mix]}: {figures['throughput']['ratio']:.1%} of undisturbed steps (goal {goal:.0%})",
        _summary(figures),
        "![throughput over time](soak.png)",
        _table(("kind", "faults", "detected in", "repaired in", "stall", "most redone"), _kinds(figures["kinds"])),
        _table(("part of a repair", "median", "max"), _parts(figures["parts_s"])),
        _table(("held", "first calm", "last calm", ""), _growth(figures["growth"])),
        _table(("second", "fault", "detected in", "repaired in", "stall", "redone", "note"), _faults(found)),
    ]
    path.write_text("\n\n".join(block for block in blocks if block) + "\n")


def _summary(figures: Mapping[str, Any]) -> str:
    made, faults, same = figures["throughput"], figures["faults"], figures["divergence"]
    calms = ", ".join(f"{rate:.3f}" for rate in made["calm_steps_per_s"])
    left = figures["left_over"]
    lines = [
        f"{faults['survived']} of {faults['planned']} faults in {figures['minutes']:g} minutes were survived, on four "
        f"workers, layout `{figures['layout']}`, seed {figures['seed']}.",
        f"{made['steps_made']:.0f} steps were made, {made['steps_due']:.0f} were expected. Rates in the calm periods "
        f"before, between and after the storms: {calms} steps a second ({made['calm_spread']:.1%} apart); a step takes "
        f"{made['step_s']:.3f} s. Relative to the fastest and slowest calm period alone: "
        f"{' and '.join(f'{each:.1%}' for each in made['ratio_range'])}; relative to the median step between the "
        f"faults: {made['ratio_to_steps_between']:.1%}.",
        f"Losses and samples of all {same['steps']} steps and the last state "
        + ("are equal in every bit to the run that never failed." if same["equal"] else f"DIFFER: {_odd(same)}."),
        f"Left behind: {', '.join(left) if left else 'nothing'}. Load of the machine at the end: {figures['load']}.",
        "Repair time is counted from detection to the first finished step. Stall is the whole time lost, from the "
        "fault to the next new step, minus the time that a step takes.",
    ]
    return "\n\n".join(lines)


def _odd(same: Mapping[str, Any]) -> str:
    names = [name for name in ("losses", "samples") if not same[f"{name}_equal"]]
    return ", ".join([*names, *([same["state"]] if same["state"] else [])])


def _kinds(kinds: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (
            kind,
            f"{row['num']}" + (f" ({row['num_joined']} joined)" if row["num_joined"] else ""),
            *(_middle(row[name]) for name in ("detected_s", "repaired_s", "stall_s")),
            _dash(row["most_redone"]),
        )
        for kind, row in kinds.items()
    ]


def _middle(value: Mapping[str, float] | None) -> str:
    return f"{value['median']:.2f} s, at most {value['max']:.2f} s" if value else "-"


def _dash(value: object) -> str:
    return "-" if value is None else str(value)


def _parts(parts: Mapping[str, Mapping[str, float]]) -> list[tuple[str, ...]]:
    return [(name, f"{row['median']:.3f} s", f"{row['max']:.3f} s") for name, row in parts.items()]


def _growth(held: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (name, f"{row['before']:,}", f"{row['after']:,}", "LEAK" if row["is_leak"] else "")
        for name, row in held.items()
    ]


def _faults(found: Sequence[Cost]) -> list[tuple[str, ...]]:
    return [
        (
            f"{one.struck.at_s:.1f}",
            f"{one.struck.kind}, rank {one.struck.rank}",
            *(_dash(value and f"{value:.2f} s") for value in (one.detected_s, one.repaired_s, one.stall_s)),
            _dash(one.num_redone),
            one.struck.note + ("; with another one" if one.is_joined else "") + ("" if one.survived else "; LOST"),
        )
        for one in found
    ]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
