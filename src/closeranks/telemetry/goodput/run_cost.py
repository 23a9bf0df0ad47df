"""What did a run cost: device-hours, money and energy, as a whole and for a million items? Pure but for ``find_price``.

Invariant: what has no price costs nothing that is shown: the price is said to be unknown instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from closeranks.core.errors import UserError
from closeranks.facts.prices import DevicePrice, load_prices
from closeranks.telemetry.goodput.time_account import TimeAccount
from closeranks.telemetry.run_log.run_folder import RunFolder

_SIGNS = {"USD": "$", "EUR": "€", "GBP": "£"}


def find_price(folder: Path, device: str) -> tuple[DevicePrice | None, str]:
    """The price of a run's device, by the table that its job names, and a note if that cannot be used any more."""
    path, note = RunFolder(folder).resolved().get("telemetry.prices"), ""
    try:
        table = load_prices(path if isinstance(path, str) else "")
    except UserError as error:
        table, note = load_prices(), f"{error}; the built-in prices are used"
    return table.price_of(device), note


def money(amount: float, currency: str) -> str:
    """``$0.0031``, ``$12.40``, ``1,204 CHF``: cents, or two digits of less than a cent."""
    if amount >= 1000:
        text = f"{amount:,.0f}"
    elif amount >= 0.095 or amount == 0:
        text = f"{amount:.2f}"
    else:
        text = f"{amount:#.2g}" if amount >= 1e-4 else f"{amount:.1e}"
    return f"{_SIGNS[currency]}{text}" if currency in _SIGNS else f"{text} {currency}"


def per_million(cost: float, count: int) -> float | None:
    """None before anything was counted."""
    return cost * 1e6 / count if count else None


def cost_words(account: TimeAccount, price: DevicePrice | None, device: str, item: str) -> str:
    """``$0.012 at $3.78 an hour (H100, Lambda, 2026-05-07); $0.31 per million tokens, $40 per million samples``."""
    if price is None:
        return f"no price known for {device}: name a price table in telemetry.prices"
    cost = price.cost(account.device_hours)
    where = ", ".join(filter(None, (price.device, price.source, price.date)))
    text = f"{money(cost, price.currency)} at {money(price.per_hour, price.currency)} per device-hour ({where})"
    counts = {item: account.num_items, "sample": account.num_samples}
    each = [
        f"{money(share, price.currency)} per million {name}s"
        for name, count in counts.items()
        if (share := per_million(cost, count)) is not None
    ]
    return f"{text}; {', '.join(each)}" if each else text


def energy_of(power: Iterable[tuple[float, float]]) -> float:
    """Joules from a series of instants and watts, in order of time: trapezoids between them."""
    total, last = 0.0, None
    for at, watts in power:
        if last is not None and at > last[0]:
            total += (at - last[0]) * (watts + last[1]) / 2
        last = (at, watts)
    return total


def energy_words(joules: float) -> str:
    """``820 J``, ``4.1 kWh``."""
    return f"{joules:.3g} J" if joules < 3.6e4 else f"{joules / 3.6e6:.3g} kWh"


class CostClock:
    """What a command has cost so far: its workers times the time since ``began_at``, on ``clock``."""

    def __init__(self, price: DevicePrice, num_workers: int, began_at: float, clock: Callable[[], float]) -> None:
        self._price, self._num_workers, self._at, self._clock = price, num_workers, began_at, clock
        self._device_s = 0.0

    def resize(self, num_workers: int) -> None:
        now = self._clock()
        self._device_s += self._num_workers * (now - self._at)
        self._num_workers, self._at = num_workers, now

    def words(self) -> str:
        device_s = self._device_s + self._num_workers * (self._clock() - self._at)
        return money(self._price.cost(device_s / 3600), self._price.currency)
