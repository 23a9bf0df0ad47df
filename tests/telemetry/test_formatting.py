import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.telemetry import formatting


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.13449, "2.1345"), (12.3456, "12.346"), (0.0123, "0.0123"), (0.00123, "1.23e-03"), (123456, "1.23e+05"),
     (0, "0.0000"), (math.nan, "nan"), (-math.inf, "-inf"), (9.99999, "10.000")],
)  # fmt: skip
def test_number(value: float, text: str) -> None:
    assert formatting.number(value) == text


@given(st.floats(-1e300, 1e300))
def test_a_number_is_short_and_close(value: float) -> None:
    text = formatting.number(value)
    assert len(text) <= 10
    assert math.isclose(float(text), value, rel_tol=0.006, abs_tol=1e-12) or float(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [(41_234, "41.2k"), (999.6, "1.00k"), (999_600, "1.00M"), (1_235_814_400, "1.24B"), (4.2e14, "420T"), (7, "7"),
     (3.4567, "3.46"), (0, "0")],
)  # fmt: skip
def test_compact(value: float, text: str) -> None:
    assert formatting.compact(value) == text


@given(st.floats(1.0, 9e14))
def test_compact_says_the_same_number(value: float) -> None:
    text = formatting.compact(value)
    units = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    number = float(text[:-1]) * units[text[-1]] if text[-1] in units else float(text)
    assert math.isclose(number, value, rel_tol=0.006)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(42, "0:42"), (723, "12:03"), (3723, "1:02:03"), (183_840, "2d 03:04"), (-1, "0:00"), (0.2, "0:01")],
)
def test_clock(seconds: float, text: str) -> None:
    assert formatting.clock(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.08, "80 ms"), (3.21, "3.2 s"), (31.2, "31 s"), (59.7, "1 min 0 s"), (125, "2 min 5 s"), (3790, "1 h 3 min")],
)
def test_span(seconds: float, text: str) -> None:
    assert formatting.duration(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1 << 20, "1.0 MiB"), (512 << 20, "512 MiB"), (1_288_490_188, "1.2 GiB")],
)
def test_size(num_bytes: int, text: str) -> None:
    assert formatting.size(num_bytes) == text


def test_units_and_shares() -> None:
    assert formatting.rate(41_200, "token") == "41.2k tok/s"
    assert formatting.rate(812, "sample") == "812 samples/s"
    assert formatting.percent(0.5034) == "50.3%"
    assert formatting.percent(0.00003) == "0.003%"
    assert formatting.metric(0.9612) == "0.961"
    assert formatting.tick(40_000) == "40k"
    assert formatting.brief(5.5) == "5.50"
    assert formatting.brief(123.4) == "123"
