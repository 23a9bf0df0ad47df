"""What does an hour of a device cost? A price table: that of the user, then our own (``prices.toml``).

Invariant: a device that is in neither has no price; none is ever guessed. Each price names its source and date.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

from closeranks.core.errors import UserError
from closeranks.core.system.regular_file import read_text

_BUILT_IN = Path(__file__).with_name("prices.toml")
_MOST_BYTES = 1 << 20
_KEYS = {"device", "per_hour", "source", "date"}


@dataclass(frozen=True, slots=True)
class DevicePrice:
    device: str
    """Words of the name that the driver gives to the device."""
    per_hour: float
    currency: str
    source: str = ""
    date: str = ""

    def cost(self, device_hours: float) -> float:
        return self.per_hour * device_hours


@dataclass(frozen=True, slots=True)
class PriceTable:
    prices: tuple[DevicePrice, ...] = ()

    def price_of(self, device_name: str) -> DevicePrice | None:
        """None if the table has no price for the device the driver calls ``device_name``."""
        for price in self.prices:
            # Whole words only: "L4" must not match "L40S".
            if re.search(rf"(?<![A-Za-z0-9]){re.escape(price.device)}(?![A-Za-z0-9])", device_name, re.IGNORECASE):
                return price
        return None


def load_prices(path: str = "") -> PriceTable:
    """Our own table, after that of the file, if there is one; ``UserError`` for one that cannot be used."""
    own = _built_in()
    return PriceTable((*_read(Path(path)), *own.prices)) if path else own


@cache
def _built_in() -> PriceTable:
    return PriceTable(_read(_BUILT_IN))


def _read(path: Path) -> tuple[DevicePrice, ...]:
    try:
        return parse_prices(tomllib.loads(read_text(path, _MOST_BYTES)))
    except OSError as error:
        raise UserError(f"the prices {path} cannot be read: {error.strerror or error}", _FIX) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"the prices {path} cannot be used: {error}", _FIX) from error


_FIX = "Write a TOML file with [[price]] entries of device and per_hour (docs/goodput.md), or clear telemetry.prices."


def parse_prices(values: Mapping[str, Any]) -> tuple[DevicePrice, ...]:
    """``ValueError`` for anything that is not a price table."""
    if unknown := sorted(set(values) - {"currency", "price"}):
        raise ValueError(f"'{unknown[0]}' is neither currency nor [[price]]")
    currency, entries = values.get("currency", "USD"), values.get("price", [])
    if not isinstance(currency, str) or not re.fullmatch(r"[A-Z]{3}", currency):
        raise ValueError('currency must be a code of three letters, such as "EUR"')
    if not isinstance(entries, list):
        raise ValueError("price must be a list: write [[price]]")
    return tuple(_price(entry, currency) for entry in entries)


def _price(entry: Any, currency: str) -> DevicePrice:
    if not isinstance(entry, dict) or not isinstance(entry.get("device"), str) or not entry["device"].strip():
        raise ValueError('every [[price]] needs a device, such as device = "H100"')
    device, per_hour = entry["device"].strip(), entry.get("per_hour")
    if unknown := sorted(set(entry) - _KEYS):
        raise ValueError(f"the price of {device} has an unknown key '{unknown[0]}'")
    if isinstance(per_hour, bool) or not isinstance(per_hour, int | float) or not 0 <= per_hour < math.inf:
        raise ValueError(f"the price of {device} needs per_hour, a number that is not negative")
    source, day = entry.get("source", ""), entry.get("date", "")
    if not isinstance(source, str) or not isinstance(day, str | date):
        raise ValueError(f"source and date of the price of {device} must be text")
    return DevicePrice(device, float(per_hour), currency, source, str(day))
