"""Cost and energy of a run, as numbers and in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from closeranks.facts.prices import DevicePrice
from closeranks.telemetry.goodput.run_cost import CostClock, cost_words, energy_of, energy_words, find_price, money
from closeranks.telemetry.goodput.time_account import TimeAccount

PRICE = DevicePrice("H100", 3.6, "USD", "a list", "2026-05-07")
ACCOUNT = TimeAccount(worker_s=7200.0, wall_s=1800.0, num_items=2_000_000, num_samples=1000, num_steps=10)


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0.0, "$0.00"),
        (12.4, "$12.40"),
        (0.3141, "$0.31"),
        (0.0031, "$0.0031"),
        (0.001, "$0.0010"),
        (1204.4, "$1,204"),
        (2e-6, "$2.0e-06"),
    ],
)
def test_money(amount: float, text: str) -> None:
    assert money(amount, "USD") == text


def test_other_currencies() -> None:
    assert (money(2.0, "EUR"), money(2.0, "CHF")) == ("€2.00", "2.00 CHF")


def test_cost_per_million() -> None:
    text = cost_words(ACCOUNT, PRICE, "NVIDIA H100", "token")
    assert text == (
        "$7.20 at $3.60 per device-hour (H100, a list, 2026-05-07); "
        "$3.60 per million tokens, $7,200 per million samples"
    )
    assert "per million samples" in cost_words(ACCOUNT, PRICE, "NVIDIA H100", "sample")
    assert "million tokens" not in cost_words(ACCOUNT, PRICE, "NVIDIA H100", "sample")


def test_without_a_price_no_cost_is_shown() -> None:
    assert cost_words(ACCOUNT, None, "Xeon", "token").startswith("no price known for Xeon: ")


def test_cost_follows_the_number_of_workers() -> None:
    now = [100.0]
    clock = CostClock(PRICE, 4, 0.0, lambda: now[0])
    assert clock.words() == money(4 * 100 / 3600 * 3.6, "USD")
    clock.resize(2)
    now[0] = 200.0
    assert clock.words() == money((400 + 200) / 3600 * 3.6, "USD")


def test_energy_is_the_integral_of_power() -> None:
    assert energy_of([(0.0, 100.0), (1.0, 300.0), (3.0, 300.0)]) == pytest.approx(800)
    assert energy_of([(5.0, 100.0)]) == 0.0
    assert energy_of([(0.0, 100.0), (0.0, 900.0), (2.0, 100.0)]) == pytest.approx(1000)
    assert (energy_words(820.0), energy_words(7.2e6)) == ("820 J", "2 kWh")


def test_the_price_is_that_of_the_runs_own_table(tmp_path: Path) -> None:
    table = tmp_path / "mine.toml"
    table.write_text('[[price]]\ndevice = "Xeon"\nper_hour = 0.5\n')
    (tmp_path / "config.json").write_text(json.dumps({"telemetry": {"prices": str(table)}}))
    price, note = find_price(tmp_path, "Intel Xeon")
    assert price is not None
    assert (price.per_hour, note) == (0.5, "")
    table.unlink()
    price, note = find_price(tmp_path, "NVIDIA H100")
    assert price is not None
    assert note.endswith("the built-in prices are used")
