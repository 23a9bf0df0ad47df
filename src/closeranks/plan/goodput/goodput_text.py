"""Formats forecasts of goodput as sentences, table rows and JSON.

Pure: sweeps in, text out; ``cli`` prints it. Invariant: what is assumed is said with its value, and figures that come
from random failures are shown with their spread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from closeranks.facts.durations import format_duration as duration
from closeranks.facts.failures.failure_rates import FailureTable
from closeranks.facts.prices import DevicePrice
from closeranks.plan.goodput.forecast import GoodputForecast, SpareSweep, Spread
from closeranks.plan.goodput.scenario import RecoveryStrategy, expected_in_repair
from closeranks.plan.goodput.time_rows import ROW_WORDS, USEFUL

Rows = list[tuple[str, ...]]
"""The first is the heading."""
_SIGNS = {"USD": "$", "EUR": "€", "GBP": "£"}
_SHOWN_KINDS = 5
_SHOWN = 1e-6
"""Losses of a smaller share are left out."""
CLOSED_FORM_REMARK = "The closed form is Daly's: hosts that never run short, no slow ones, and no silent corruption."


def headline(sweeps: Sequence[SpareSweep], table: FailureTable, name: str, num_runs: int) -> str:
    scenario = sweeps[0].chosen.scenario
    mtbf_s = table.mtbf_s(scenario.num_devices)
    often = "no failures" if math.isinf(mtbf_s) else f"a failure every {duration(mtbf_s)}"
    origin = f"'{name}'" + (f" ({table.source})" if table.source else "")
    devices, hosts, runs = (
        f"{count:,} {noun}{'' if count == 1 else 's'}"
        for count, noun in ((scenario.num_devices, "device"), (scenario.num_hosts, "host"), (num_runs, "simulated run"))
    )
    return (
        f"{devices} on {hosts} for {duration(scenario.wall_s)}: {often}, "
        f"by the table {origin}; {expected_in_repair(scenario, table):.2g} hosts under repair on average.\n"
        f"{runs}; the medians, and in brackets the middle half of the runs."
    )


def strategy_rows(sweeps: Sequence[SpareSweep], price: DevicePrice | None) -> Rows:
    rows: Rows = [
        (
            "",
            "goodput",
            "closed form",
            "interruptions",
            "from checkpoint",
            "spares",
            "save every",
            "paid / useful",
            "cost",
        )
    ]
    for sweep in sweeps:
        chosen = sweep.chosen
        rows.append(
            (
                sweep.strategy.name, _percents(chosen.goodput), percent(chosen.closed_form),
                _counts(chosen.interruptions), _mean(chosen.num_rollbacks), f"{chosen.scenario.spares:,}",
                duration(chosen.save_every_s), _ratio(chosen), _cost(chosen, price),
            )
        )  # fmt: skip
    return rows


def loss_rows(sweeps: Sequence[SpareSweep]) -> Rows:
    """Where the time of the workers goes: the share, and that much of the wall time."""
    rows: Rows = [("", *(title for sweep in sweeps for title in (sweep.strategy.name, "of the run")))]
    shown = [row for row in ROW_WORDS if row == USEFUL or any(sweep.chosen.shares[row] > _SHOWN for sweep in sweeps)]
    for row in shown:
        cells = []
        for sweep in sweeps:
            share = sweep.chosen.shares[row]
            cells += [
                percent(share) if share > _SHOWN else "-",
                duration(share * sweep.chosen.scenario.wall_s) if share > _SHOWN else "-",
            ]
        rows.append((ROW_WORDS[row], *cells))
    return rows


def spare_rows(sweeps: Sequence[SpareSweep], price: DevicePrice | None) -> Rows:
    titles = [title for sweep in sweeps for title in (sweep.strategy.name, "paid / useful", "cost")]
    rows: Rows = [("spares", *(title for title in titles if price is not None or title != "cost"))]
    for found in zip(*(sweep.forecasts for sweep in sweeps), strict=True):
        cells = []
        for sweep, one in zip(sweeps, found, strict=True):
            cells += [_percents(one.goodput), _ratio(one) + (" *" if one is sweep.best else "  ")]
            cells += [_cost(one, price)] if price is not None else []
        rows.append((str(found[0].scenario.spares), *cells))
    return rows


SPARE_REMARK = (
    "Spares are hosts that stand by. * marks the number that pays: the fewest device-hours, standing by included, per "
    "device-hour that trained the model."
)


def kinds_line(sweep: SpareSweep) -> str:
    """The most frequent causes of interruptions, as means."""
    found = list(sweep.chosen.by_kind.items())
    named = [f"{kind} {_mean(count)}" for kind, count in found[:_SHOWN_KINDS]]
    rest = sum(count for _, count in found[_SHOWN_KINDS:])
    others = [f"others {_mean(rest)}"] if rest else []
    planned = [f"{_mean(sweep.chosen.num_planned)} planned stops"] if sweep.chosen.num_planned else []
    evicted = [f"{_mean(sweep.chosen.num_evicted)} slow hosts evicted"] if sweep.chosen.num_evicted else []
    words = ", ".join([*named, *others, *planned, *evicted])
    return f"Interruptions of a run: {words}." if words else "Nothing interrupts it."


def assumptions(sweeps: Sequence[SpareSweep]) -> str:
    scenario = sweeps[0].chosen.scenario
    lines = [
        f"Steps take {duration(scenario.step_s)}; a save stalls training for {duration(scenario.stall_s)} and is "
        f"durable after {duration(scenario.durable_s)}."
    ]
    lines += [_strategy_line(sweep.strategy, scenario.step_s) for sweep in sweeps]
    if scenario.cold_spares:
        lines.append(f"{scenario.cold_spares} cold spares start within {duration(scenario.cold_s)}.")
    return "\n".join(lines)


def _strategy_line(strategy: RecoveryStrategy, step_s: float) -> str:
    hang_s = max(strategy.hang_s, strategy.hang_steps * step_s)
    source = "the last step, in memory" if strategy.from_memory else "the last checkpoint"
    short = "trains on without hosts that are missing" if strategy.shrinks else "waits for hosts that are missing"
    snapshots = f"; snapshots take {percent(strategy.snapshot_share)} of a step" if strategy.snapshot_share else ""
    return (
        f"{strategy.name}: a crash is noticed after {duration(strategy.crash_s)}, a hang after {duration(hang_s)}; "
        f"resumes {duration(strategy.recover_s)} later from {source}; {short}{snapshots}."
    )


def goodput_json(
    sweeps: Sequence[SpareSweep], table: FailureTable, price: DevicePrice | None, seeds: Sequence[int]
) -> dict[str, Any]:
    """Plain values; what is infinite becomes null."""
    scenario = sweeps[0].chosen.scenario
    found = {
        "scenario": {key: value for key, value in asdict(scenario).items() if key not in ("spares", "save_every_s")},
        "failures": asdict(table),
        "mtbf_s": table.mtbf_s(scenario.num_devices),
        "seeds": list(seeds),
        "price": None if price is None else asdict(price),
        "strategies": [
            {
                "strategy": asdict(sweep.strategy),
                "chosen_spares": sweep.chosen.scenario.spares,
                "best_spares": sweep.best.scenario.spares,
                "forecasts": [_forecast_json(one, price) for one in sweep.forecasts],
            }
            for sweep in sweeps
        ],
    }
    plain: dict[str, Any] = _plain(found)
    return plain


def _forecast_json(found: GoodputForecast, price: DevicePrice | None) -> dict[str, Any]:
    values = {key: value for key, value in asdict(found).items() if key not in ("scenario", "strategy")}
    cost = None if price is None else price.cost(found.device_hours)
    return {"spares": found.scenario.spares, **values, "hours_per_useful": found.hours_per_useful, "cost": cost}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def percent(share: float) -> str:
    """97.8%, 5.4%, 0.34%."""
    value = 100 * share
    return f"{value:.1f}%" if value >= 0.95 or value == 0 else f"{value:.2g}%"


def _mean(count: float) -> str:
    return f"{count:,.0f}" if count >= 100 else f"{count:.2g}"


def _percents(found: Spread) -> str:
    return f"{percent(found.median)} ({100 * found.low:.1f}-{100 * found.high:.1f})"


def _counts(found: Spread) -> str:
    return f"{found.median:,.0f} ({found.low:,.0f}-{found.high:,.0f})"


def _ratio(found: GoodputForecast) -> str:
    ratio = found.hours_per_useful
    return f"{ratio:.3f}" if ratio < 100 else "over 100"


def _cost(found: GoodputForecast, price: DevicePrice | None) -> str:
    if price is None:
        return "-"
    cost, sign = price.cost(found.device_hours), _SIGNS.get(price.currency, "")
    amount = f"{cost / 1e6:,.2f}M" if cost >= 1e6 else f"{cost:,.0f}"
    return f"{sign}{amount}" if sign else f"{amount} {price.currency}"
