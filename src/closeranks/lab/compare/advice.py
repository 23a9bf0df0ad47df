"""Derives a recommendation of one sentence from the result table. Pure.

Invariants: only a setting whose every run finished is recommended; a difference within the spread of the runs does not
count, and then the baseline is kept; the best is chosen among the settings that are clearly better, so that one with a
lucky mean does not hide them; what is lost is reported together with what is gained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from closeranks.lab.compare.result_table import ResultTable, RunStat, SettingRow
from closeranks.telemetry.formatting import brief, duration

MIN_GAIN = 0.02
"""A gain of less than two percent is not worth changing a job for."""
_SAME = 0.001
"""Final figures that differ by less than this share are considered equal, however small their spread."""


def is_faster(ratio: RunStat | None) -> bool:
    """Whether a setting is faster than the baseline by more than the spread over the seeds."""
    return ratio is not None and ratio.mean - 1 > max(ratio.spread, MIN_GAIN)


def is_slower(ratio: RunStat | None) -> bool:
    return ratio is not None and 1 - ratio.mean > max(ratio.spread, MIN_GAIN)


def is_same(gap: RunStat, base: SettingRow) -> bool:
    least = _SAME * abs(base.final.mean) if base.final is not None else 0.0
    return abs(gap.mean) <= max(gap.spread, least)


def is_better(table: ResultTable, row: SettingRow) -> bool:
    gap = row.final_gap
    return gap is not None and not is_same(gap, table.baseline) and (gap.mean > 0) == table.higher_is_better


def is_worse(table: ResultTable, row: SettingRow) -> bool:
    gap = row.final_gap
    return gap is None or (not is_same(gap, table.baseline) and (gap.mean > 0) != table.higher_is_better)


_TINY = 1e-5
"""Final figures that differ by less than this share are reported without the difference."""
_FEW_TIMES = 1.1
"""A ratio below this is printed with two decimals."""


class AdvicePhrase(NamedTuple):
    words: str
    by: RunStat | None
    """The figure that decided."""


def advise_all(tables: Sequence[ResultTable]) -> str:
    """A sentence for each condition."""
    return "\n".join(f"{table.condition}: {advise(table)}" if table.condition else advise(table) for table in tables)


def advise(table: ResultTable) -> str:
    sound = [row for row in table.rows if row.is_sound]
    if not sound:
        return f"No setting can be recommended: {_failures(table.rows)}."
    if table.target is not None:
        phrase = _to_target(table, sound)
    elif table.is_timed:
        phrase = _by_quality(table, sound, "in the same time")
    else:
        phrase = _by_time(table, sound)
    parts = [phrase.words]
    if phrase.by is not None and phrase.by.num == 1:
        parts.append("one run each: spread unknown")
    if lost := [row for row in table.rows if not row.is_sound]:
        parts.append(_failures(lost))
    return "; ".join(parts) + "."


def _to_target(table: ResultTable, sound: Sequence[SettingRow]) -> AdvicePhrase:
    goal = f"{table.metric} {brief(table.target or 0.0)}"
    base = table.baseline
    reached = [row for row in sound if row.has_reached]
    if not reached:
        phrase = _by_quality(table, sound, "within the budget")
        return AdvicePhrase(f"No setting reaches {goal} with every seed: {_lower(phrase.words)}", phrase.by)
    if not base.has_reached:
        best = _first_to_target(reached)
        gain = f"it reaches {goal} in {duration(_mean(best.seconds_to_target))}, {base.name} {_fell_short(base)}"
        lost = f", but it ends {_loss(table, best)}" if base.is_sound and is_worse(table, best) else ""
        return AdvicePhrase(f"Use {best.name}: {gain}{lost}{_price(table, best)}", best.seconds_to_target)
    faster = [row for row in reached if row is not base and is_faster(row.speedup)]
    if not faster:
        return _keep_baseline(table, reached, goal)
    best = _first_to_target(faster)
    mine, theirs = _mean(best.seconds_to_target), _mean(base.seconds_to_target)
    gain = f"it reaches {goal} in {duration(mine)} instead of {duration(theirs)} ({_times(theirs / mine)})"
    lost = f"{_loss(table, best)}{_price(table, best)}"
    return AdvicePhrase(f"Use {best.name}: {gain}, {lost}{_ties(best, faster, _speedup)}", best.speedup)


def _first_to_target(reached: Sequence[SettingRow]) -> SettingRow:
    return min(reached, key=lambda row: _mean(row.seconds_to_target))


def _fell_short(base: SettingRow) -> str:
    if not base.is_sound:
        return "does not finish"
    if not base.num_reached:
        return "does not get there"
    return f"gets there with {base.num_reached} of {base.num_runs} {_runs(base)}"


def _runs(row: SettingRow) -> str:
    return "seeds" if row.num_seeds == row.num_runs else "runs"


def _keep_baseline(table: ResultTable, reached: Sequence[SettingRow], goal: str) -> AdvicePhrase:
    """The advice if no setting is clearly faster than the baseline."""
    base = table.baseline
    took = duration(_mean(base.seconds_to_target))
    others = [row for row in reached if row is not base]
    if not others:
        some = " with every seed" if any(row.num_reached for row in table.rows if row is not base) else ""
        return AdvicePhrase(f"Stay with {base.name}: it alone reaches {goal}{some}, in {took}", base.seconds_to_target)
    second = _first_to_target(others)
    theirs = duration(_mean(second.seconds_to_target))
    if is_slower(second.speedup):
        reason = f"it reaches {goal} first, in {took}; the next is {second.name} with {theirs}"
    else:
        reason = f"it reaches {goal} in {took}, {second.name} in {theirs}, and that is no clear difference"
        reason += f" ({_ratio(second.speedup)})"
    return AdvicePhrase(f"Stay with {base.name}: {reason}", second.speedup)


def _speedup(row: SettingRow) -> RunStat | None:
    return row.speedup


def _seconds_ratio(row: SettingRow) -> RunStat | None:
    return row.seconds_ratio


def _ties(best: SettingRow, rows: Sequence[SettingRow], pick: Callable[[SettingRow], RunStat | None]) -> str:
    """Names the other settings whose gain does not differ from the best one's by more than the spread."""
    most, names = pick(best), []
    for row in rows:
        other = pick(row)
        if row is best or most is None or other is None or not is_faster(other):
            continue
        if most.mean - other.mean <= max(most.spread, other.spread, MIN_GAIN):
            names.append(row.name)
    return f" ({' and '.join(names)}: no clear difference from it)" if names else ""


def _ratio(ratio: RunStat | None) -> str:
    if ratio is None:
        return "one has no figure"
    return f"seed by seed {ratio.mean:.2f}x, spread {ratio.spread:.2f}" if ratio.num > 1 else f"{ratio.mean:.2f}x"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < _FEW_TIMES else f"{ratio:.1f}x"


def _by_time(table: ResultTable, sound: Sequence[SettingRow]) -> AdvicePhrase:
    """The advice if all settings train the same steps or epochs: the fastest whose final figure is not worse."""
    base = table.baseline
    if not base.is_sound:
        best = _quickest(sound)
        took = duration(_mean(best.seconds))
        return AdvicePhrase(f"Use {best.name}: it trains in {took}, and {base.name} does not finish", best.seconds)
    faster = [row for row in sound if row is not base and is_faster(row.seconds_ratio)]
    if good := [row for row in faster if not is_worse(table, row)]:
        best = _quickest(good)
        lost = f"{_loss(table, best)}{_price(table, best)}{_ties(best, good, _seconds_ratio)}"
        return AdvicePhrase(f"Use {best.name}: it {_in_less_time(best, base)}, {lost}", best.seconds_ratio)
    if better := [row for row in sound if is_better(table, row)]:
        best = _furthest(table, better)
        return _use(table, best, _over_steps(best, base) or "with the same number of steps")
    if faster:
        best = _quickest(faster)
        reason = f"{best.name} {_in_less_time(best, base)}, but ends {_loss(table, best)}"
        return AdvicePhrase(f"Stay with {base.name}: {reason}", best.seconds_ratio)
    return AdvicePhrase(
        f"Stay with {base.name}: no other setting is clearly faster or ends clearly better", base.seconds
    )


def _quickest(rows: Sequence[SettingRow]) -> SettingRow:
    return min(rows, key=lambda row: _mean(row.seconds))


def _in_less_time(row: SettingRow, base: SettingRow) -> str:
    mine, theirs = _mean(row.seconds), _mean(base.seconds)
    steps = _over_steps(row, base)
    gain = f"trains in {duration(mine)} instead of {duration(theirs)} ({_times(theirs / mine)})"
    return f"{gain} {steps}" if steps else gain


def _over_steps(row: SettingRow, base: SettingRow) -> str:
    """The number of steps, which depends on the batch size if the job counts epochs; empty if it is the same."""
    mine, theirs = round(row.num_steps), round(base.num_steps)
    return f"with {mine} steps instead of {theirs}" if mine != theirs else ""


def _by_quality(table: ResultTable, sound: Sequence[SettingRow], when: str) -> AdvicePhrase:
    base = table.baseline
    known = [row for row in sound if row.final is not None]
    if not known:
        return AdvicePhrase(f"Stay with {base.name}: no setting has a final {table.metric} to compare", None)
    best = _furthest(table, known)
    if base not in known:
        gain = f"it comes furthest {when} ({_final(table)} {brief(_mean(best.final))})"
        return AdvicePhrase(f"Use {best.name}: {gain}{_price(table, best)}", best.final)
    if better := [row for row in known if is_better(table, row)]:
        return _use(table, _furthest(table, better), when)
    reason = "it comes furthest" if best is base else "none ends clearly better"
    return AdvicePhrase(
        f"Stay with {base.name}: {reason} {when} ({_final(table)} {brief(_mean(base.final))})", base.final
    )


def _furthest(table: ResultTable, rows: Sequence[SettingRow]) -> SettingRow:
    return (max if table.higher_is_better else min)(rows, key=lambda row: _mean(row.final))


def _use(table: ResultTable, row: SettingRow, when: str) -> AdvicePhrase:
    """The advice to use a setting that ends clearly better than the baseline."""
    ends = f"{when} it ends at {_final(table)} {brief(_mean(row.final))}"
    return AdvicePhrase(f"Use {row.name}: {ends}, {_loss(table, row)}{_price(table, row)}", row.final_gap)


def _price(table: ResultTable, row: SettingRow) -> str:
    """What else the setting costs: time if it is slower, and other numbers of workers."""
    base, text = table.baseline, ""
    if base.is_sound and not table.is_timed and _mean(row.seconds) > (1 + MIN_GAIN) * _mean(base.seconds):
        what = "but takes" if table.target is None else "but the whole budget takes"
        text = f", {what} {duration(_mean(row.seconds))} instead of {duration(_mean(base.seconds))}"
    if row.num_workers != base.num_workers:
        text += f", on {row.num_workers} workers instead of {base.num_workers}"
    return text


def _loss(table: ResultTable, row: SettingRow) -> str:
    """What a setting costs in quality, compared seed by seed."""
    gap, base = row.final_gap, table.baseline
    if gap is None:
        return f"with no final {table.metric} to compare"
    spread = [f"spread {brief(gap.spread)}"] if gap.num > 1 else []
    if is_same(gap, base):
        is_tiny = base.final is not None and abs(gap.mean) < _TINY * abs(base.final.mean)
        differs = "" if is_tiny else f" ({', '.join([f'difference {brief(gap.mean)}', *spread])})"
        return f"with the same final {table.metric} as {base.name}{differs}"
    side = "higher" if gap.mean > 0 else "lower"
    text = f"at a final {table.metric} {brief(abs(gap.mean))} {side} than {base.name}"
    return f"{text} ({spread[0]})" if spread else text


def _final(table: ResultTable) -> str:
    return f"{'evaluation' if table.is_evaluated else 'training'} {table.metric}"


def _failures(rows: Sequence[SettingRow]) -> str:
    return ", ".join(f"{row.name} {row.reason.partition(':')[0]}" for row in rows)


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]


def _mean(stat: RunStat | None) -> float:
    assert stat is not None
    return stat.mean
