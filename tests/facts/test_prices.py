"""What an hour of a device costs: the user's table first, and nothing is guessed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from closeranks.core.errors import UserError
from closeranks.facts.prices import load_prices, parse_prices

OWN = """
currency = "EUR"
[[price]]
device = "H100"
per_hour = 1.9
source = "our contract"
date = 2026-10-01
[[price]]
device = "Xeon"
per_hour = 0.04
"""


def test_every_built_in_price_names_its_source_and_date() -> None:
    prices = load_prices().prices
    assert len(prices) >= 10
    for price in prices:
        assert price.per_hour > 0
        assert price.currency == "USD"
        assert price.source
        assert price.date.startswith("20")


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA H200", "H200"),
        ("Intel Xeon Processor @ 2.50GHz", None),
        ("NVIDIA GeForce RTX 9999", None),
    ],
)
def test_a_device_has_its_own_price_or_none(name: str, device: str | None) -> None:
    price = load_prices().price_of(name)
    assert (price and price.device) == device


def test_the_users_table_comes_first(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(OWN)
    table = load_prices(str(path))
    own = table.price_of("NVIDIA H100 PCIe")
    assert own is not None
    assert (own.per_hour, own.currency, own.source, own.date) == (1.9, "EUR", "our contract", "2026-10-01")
    assert own.cost(10) == pytest.approx(19)
    cpu, other = table.price_of("Intel Xeon"), table.price_of("NVIDIA L4")
    assert cpu is not None
    assert cpu.per_hour == 0.04
    assert other is not None
    assert other.currency == "USD"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[price]]\ndevice = 'H100'", "the price of H100 needs per_hour"),
        ("[[price]]\ndevice = 'H100'\nper_hour = -1", "not negative"),
        ("[[price]]\ndevice = 'H100'\nper_hour = true", "needs per_hour"),
        ("[[price]]\ndevice = 'H100'\nper_hour = nan", "needs per_hour"),
        ("[[price]]\nper_hour = 1", "needs a device"),
        ("[[price]]\ndevice = 'H100'\nper_hour = 1\nhours = 2", "unknown key 'hours'"),
        ("[price]\ndevice = 'H100'", "must be a list"),
        ("prices = 3", "'prices' is neither"),
        ("currency = 'dollars'", "three letters"),
        ("currency = ", "cannot be used"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_in_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=said):
        load_prices(str(path))


def test_a_missing_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load_prices(str(tmp_path / "none.toml"))
    assert parse_prices({}) == ()


def test_the_table_that_the_page_shows_can_be_used() -> None:
    page = (Path(__file__).parents[2] / "docs" / "goodput.md").read_text()
    found = re.search(r"```text\n(currency.*?)```", page, re.DOTALL)
    assert found is not None
    (price,) = parse_prices(tomllib.loads(found[1]))
    assert (price.device, price.per_hour, price.currency) == ("H100", 1.9, "EUR")
