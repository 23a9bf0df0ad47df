"""What follows from the table, in one sentence? Pure.

Invariants: only a setting whose every run finished is recommended; a difference within the spread of the runs is not
called one, and then the baseline stays; what is lost is told together with what is gained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from closeranks.cli.compare.table import Row, Stat, Table
from closeranks.telemetry.wording import brief, span

_CLEAR = 0.02
"""Less than two percent is no gain that anybody would change a job for."""
_SAME = 0.001
"""Final figures that differ by less than this share are the same to anybody, however small their spread;"""
_TINY = 1e-5
"""and by less than this, nobody wants to hear of it."""


def advise(table: Table) -> str:
    sound = [row for row in table.rows if row.is_sound]
    if not sound:
        return f"No setting can be recommended: {_troubles(table.rows)}."
    if table.target is not None:
        said = _to_target(table, sound)
    elif table.is_timed:
        said = _by_quality(table, sound, "in the same time")
    else:
        said = _by_time(table, sound)
    lost = [row for row in table.rows if not row.is_sound]
    return f"{said}; {_troubles(lost)}." if lost else f"{said}."


def _to_target(table: Table, sound: Sequence[Row]) -> str:
    goal = f"{table.metric} {brief(table.target or 0.0)}"
    reached = [row for row in sound if row.has_reached]
    if not reached:
        return f"No setting reaches {goal} with every seed: {_lower(_by_quality(table, sound, 'within the budget'))}"
    best = min(reached, key=lambda row: _mean(row.seconds_to_target))
    base = table.baseline
    if not base.has_reached:
        what = "does not get there" if base.is_sound else "does not finish"
        return f"Use {best.name}: it reaches {goal} in {span(_mean(best.seconds_to_target))}, {base.name} {what}"
    if best is base or not _is_faster(best.speedup):
        return _stay(base, reached, goal)
    times = _mean(base.seconds_to_target) / _mean(best.seconds_to_target)
    gain = f"in {span(_mean(best.seconds_to_target))} instead of {span(_mean(base.seconds_to_target))} ({times:.1f}x)"
    return f"Use {best.name}: it reaches {goal} {gain}, {_loss(table, best)}{_ties(best, reached, _speedup)}"


def _stay(base: Row, reached: Sequence[Row], goal: str) -> str:
    """Nobody is clearly faster than the baseline."""
    took = span(_mean(base.seconds_to_target))
    others = [row for row in reached if row is not base]
    if not others:
        return f"Stay with {base.name}: it alone reaches {goal}, in {took}"
    next_best = min(others, key=lambda row: _mean(row.seconds_to_target))
    theirs = span(_mean(next_best.seconds_to_target))
    if _is_slower(next_best.speedup):
        return f"Stay with {base.name}: it reaches {goal} first, in {took}; the next is {next_best.name} with {theirs}"
    return (
        f"Stay with {base.name}: it reaches {goal} in {took}, {next_best.name} in {theirs}, "
        f"and that is no clear difference ({_ratio(next_best.speedup)})"
    )


def _speedup(row: Row) -> Stat | None:
    return row.speedup


def _seconds_ratio(row: Row) -> Stat | None:
    return row.seconds_ratio


def _ties(best: Row, rows: Sequence[Row], pick: Callable[[Row], Stat | None]) -> str:
    """Who else gains as much, as far as the spread lets anybody tell."""
    most, names = pick(best), []
    for row in rows:
        other = pick(row)
        if row is best or most is None or other is None or not _is_faster(other):
            continue
        if most.mean - other.mean <= max(most.spread, other.spread, _CLEAR):
            names.append(row.name)
    return f" ({' and '.join(names)}: no clear difference from it)" if names else ""


def _ratio(ratio: Stat | None) -> str:
    return f"seed by seed {ratio.mean:.2f}x, spread {ratio.spread:.2f}" if ratio is not None else "one has no figure"


def _by_time(table: Table, sound: Sequence[Row]) -> str:
    """The same number of steps for all: who is done first without having learned less?"""
    base = table.baseline
    if not base.is_sound:
        best = min(sound, key=lambda row: _mean(row.seconds))
        return f"Use {best.name}: it trains in {span(_mean(best.seconds))}, and {base.name} does not finish"
    faster = [row for row in sound if row is not base and _is_faster(row.seconds_ratio)]
    good = [row for row in faster if not _is_worse(table, row)]
    if good:
        best = min(good, key=lambda row: _mean(row.seconds))
        ties = _ties(best, good, _seconds_ratio)
        return f"Use {best.name}: it {_in_less_time(best, base)}, {_loss(table, best)}{ties}"
    if faster:
        best = min(faster, key=lambda row: _mean(row.seconds))
        return f"Stay with {base.name}: {best.name} {_in_less_time(best, base)}, but ends {_loss(table, best)}"
    better = [row for row in sound if row is not base and _is_better(table, row)]
    if better:
        return _by_quality(table, sound, "with the same number of steps")
    return f"Stay with {base.name}: no other setting is clearly faster or ends clearly better"


def _in_less_time(row: Row, base: Row) -> str:
    times = _mean(base.seconds) / _mean(row.seconds)
    return f"trains in {span(_mean(row.seconds))} instead of {span(_mean(base.seconds))} ({times:.1f}x)"


def _by_quality(table: Table, sound: Sequence[Row], when: str) -> str:
    known = [row for row in sound if row.final is not None]
    if not known:
        return f"Stay with {table.baseline.name}: no setting has a final {table.metric} to compare"
    best = (max if table.rises else min)(known, key=lambda row: _mean(row.final))
    base = table.baseline
    if best is base or (base in known and not _is_better(table, best)):
        told = "none ends clearly better" if best is not base else "it comes furthest"
        return f"Stay with {base.name}: {told} {when} ({_final(table)} {brief(_mean(base.final))})"
    if base not in known:
        return f"Use {best.name}: it comes furthest {when} ({_final(table)} {brief(_mean(best.final))})"
    return f"Use {best.name}: {when} it ends at {_final(table)} {brief(_mean(best.final))}, {_loss(table, best)}"


def _loss(table: Table, row: Row) -> str:
    """What a setting costs in quality, seed against seed."""
    gap = row.final_gap
    if gap is None:
        return f"with no final {table.metric} to compare"
    base = table.baseline
    if _is_same(gap, base):
        is_tiny = base.final is not None and abs(gap.mean) < _TINY * abs(base.final.mean)
        differs = "" if is_tiny else f" (difference {brief(gap.mean)}{_of_runs(gap)})"
        return f"with the same final {table.metric} as {base.name}{differs}"
    side = "higher" if gap.mean > 0 else "lower"
    return f"at a final {table.metric} {brief(abs(gap.mean))} {side} than {base.name} ({_of_runs(gap)[2:]})"


def _of_runs(gap: Stat) -> str:
    return f", spread {brief(gap.spread)}" if gap.num > 1 else ", one run each: no spread is known"


def _final(table: Table) -> str:
    return f"{'evaluation' if table.is_evaluated else 'training'} {table.metric}"


def _is_faster(ratio: Stat | None) -> bool:
    """Than the baseline, by more than the ratios of the seeds lie apart."""
    return ratio is not None and ratio.mean - 1 > max(ratio.spread, _CLEAR)


def _is_slower(ratio: Stat | None) -> bool:
    return ratio is not None and 1 - ratio.mean > max(ratio.spread, _CLEAR)


def _is_same(gap: Stat, base: Row) -> bool:
    least = _SAME * abs(base.final.mean) if base.final is not None else 0.0
    return abs(gap.mean) <= max(gap.spread, least)


def _is_better(table: Table, row: Row) -> bool:
    gap = row.final_gap
    return gap is not None and not _is_same(gap, table.baseline) and (gap.mean > 0) == table.rises


def _is_worse(table: Table, row: Row) -> bool:
    gap = row.final_gap
    return gap is None or (not _is_same(gap, table.baseline) and (gap.mean > 0) != table.rises)


def _troubles(rows: Sequence[Row]) -> str:
    return ", ".join(f"{row.name} {row.reason.partition(':')[0]}" for row in rows)


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]


def _mean(stat: Stat | None) -> float:
    assert stat is not None
    return stat.mean
