"""Formats a checkpoint policy as sentences and table rows.

Pure: a policy in, sentences and cells out; ``cli`` prints them. Invariant: every figure has a unit or a column that
says what it counts, and every assumption is stated.
"""

from __future__ import annotations

import math

from closeranks.facts.checkpoint_policy.save_interval import lost_s
from closeranks.facts.durations import format_duration as duration
from closeranks.plan.policy import LOCAL, NOTICES_S, STORE, CheckpointPolicy, checkpoint_table

Rows = list[tuple[str, ...]]
"""The first is the heading."""
_FOR_EVER_S = 1e10


def headline(policy: CheckpointPolicy, num_measured: int = 0) -> str:
    scenario = policy.situation
    job = f"{duration(scenario.length_s)} of work on {'preemptible' if scenario.is_preemptible else 'lasting'} machines"
    source = f"measured in {num_measured} saves" if num_measured else "assumed"
    return (
        f"{job}, a failure every {duration(scenario.mtbf_s)}: save every {duration(policy.nesting.period_s)}; "
        f"{percent(policy.waste)} of the time is lost.\n"
        f"A save ({size(scenario.state_bytes)}) stalls training for {duration(scenario.stall_s)} and is stored after "
        f"{duration(scenario.durable_s)} ({source}); a restart takes {duration(scenario.restart_s)}."
    )


def level_rows(policy: CheckpointPolicy) -> Rows:
    rows: Rows = [
        ("place", "save every", "stored after", "needed every", "redo per failure", "saves", "written", "kept", "cost")
    ]
    for placed, stored in zip(policy.nesting.placed, policy.storage, strict=True):
        level = placed.level
        rows.append(
            (
                level.name, duration(placed.period_s), duration(level.durable_s), duration(level.mtbf_s),
                duration(lost_s(placed.period_s, level)), f"{stored.num_saves:,.0f}", size(stored.written_bytes),
                size(stored.kept_bytes), f"${stored.cost:.2f}" if stored.cost or level.name != LOCAL else "-",
            )
        )  # fmt: skip
    return rows


def tables(policy: CheckpointPolicy) -> list[tuple[str, str, Rows]]:
    """Title, remark below (or none) and rows of each further table."""
    title = "Against other policies" + (", saving to the store alone" if policy.situation.has_store else "")
    found = [
        (title, "", _strategy_rows(policy)),
        ("Many such jobs on one store", _contention_remark(), _contention_rows(policy)),
    ]
    if policy.ages:
        found.append(("By age of machines that all started together", _age_remark(policy), _age_rows(policy)))
    return found


def _strategy_rows(policy: CheckpointPolicy) -> Rows:
    rows: Rows = [("", "save every", "time lost", "redo per failure", "the job takes", "saves")]
    for strategy in policy.habits:
        is_saving = math.isfinite(strategy.period_s)
        takes = f"{strategy.takes_s / 3600:,.1f} h" if strategy.takes_s < _FOR_EVER_S else "forever"
        rows.append(
            (
                strategy.name, duration(strategy.period_s) if is_saving else "-", percent(strategy.waste),
                duration(strategy.lost_s), takes, f"{strategy.num_saves:,.0f}",
            )
        )  # fmt: skip
    return rows


def _contention_rows(policy: CheckpointPolicy) -> Rows:
    rows: Rows = [("jobs", "save every", "store in use", "stored after", "time lost", "at once: after", "time lost")]
    for entry in policy.crowds:
        mark = " *" if entry.num_jobs == policy.situation.num_jobs else "  "
        rows.append(
            (
                f"{entry.num_jobs}{mark}", duration(entry.period_s), percent(entry.load), duration(entry.random_s),
                percent(entry.waste), duration(entry.aligned_s), percent(entry.aligned_waste),
            )
        )  # fmt: skip
    return rows


def _contention_remark() -> str:
    return (
        "* marks this one. The store shares its bandwidth fairly among running saves; each job saves at its own "
        "time, or all at once."
    )


def _age_rows(policy: CheckpointPolicy) -> Rows:
    rows: Rows = [("age", "hazard", "save every")]
    for age in policy.ages:
        hours = f"{age.first_s / 3600:.0f} to {age.last_s / 3600:.0f} h"
        rows.append((hours, f"{age.danger:.2g} x", duration(age.period_s)))
    return rows


def _age_remark(policy: CheckpointPolicy) -> str:
    return (
        f"An assumed bathtub curve over a one-day lifetime. Adapting to it would save {percent(policy.age_gain)} of "
        'what saving and redoing cost; every = "auto" keeps one interval.'
    )


def footer(policy: CheckpointPolicy) -> str:
    parts = []
    dropped = policy.nesting.dropped
    if dropped:
        parts.append(f"A copy on the {' and the '.join(dropped)} would cost more than it saves here, and is left out.")
    monthly = sum(row.monthly_cost for row in policy.storage)
    parts.append(f"The checkpoints that are kept cost ${monthly:.2f} a month at ${policy.situation.price:g} per GB.")
    if policy.situation.is_preemptible:
        parts.append(_notice(policy))
    return "\n".join([*parts, "", "Recommended:", "", checkpoint_table(policy)])


def _notice(policy: CheckpointPolicy) -> str:
    """Whether a last save finishes before a machine that was given notice is stopped."""
    last_s = policy.nesting.placed[-1].level.durable_s
    place = "in the store" if policy.nesting.placed[-1].level.name == STORE else "on disk"
    fits = [notice_s for notice_s in NOTICES_S if last_s <= notice_s]
    notices = " and ".join(duration(notice_s) for notice_s in (fits or NOTICES_S))
    verdict = f"within a notice of {notices}" if fits else f"too late for a notice of {notices}"
    return f"A last save on SIGTERM is {place} after {duration(last_s)}: {verdict}."


def percent(part: float) -> str:
    """1.5%, 24%, 99.7%, over 99.9%."""
    percent = 100 * part
    if 99 <= percent < 100:
        return f"{percent:.1f}%" if percent < 99.9 else "over 99.9%"
    if percent >= 9.95:
        return f"{percent:.0f}%"
    return f"{percent:.1f}%" if percent >= 0.95 else f"{percent:.2g}%"


def size(num_bytes: float) -> str:
    """14 GB, 8.7 TB; decimal, as stores are priced."""
    for unit, name in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes:.0f} B"
