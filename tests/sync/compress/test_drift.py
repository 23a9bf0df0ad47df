"""What is usual for a compressor is no alarm; a lasting rise is, once."""

import math

import pytest

from closeranks.sync.compress.drift import NUM_LASTING, NUM_USUAL, CompressionDrift, error_and_cosine


def told(values: list[tuple[float, float]]) -> list[int]:
    drift = CompressionDrift()
    return [number for number, value in enumerate(values) if drift.observe(*value)]


def test_what_was_always_lost_is_no_alarm() -> None:
    assert told([(0.95, 0.3)] * 50) == []


def test_a_lasting_rise_is_told_once_until_it_is_over() -> None:
    usual, odd = [(0.1, 0.99)] * NUM_USUAL, [(0.2, 0.98)] * 10
    assert told(usual + odd) == [NUM_USUAL + NUM_LASTING - 1]
    assert len(told(usual + odd + usual + odd)) == 2


def test_a_single_odd_step_is_not_told() -> None:
    assert told(([(0.1, 0.99)] * 6 + [(5.0, 0.1)]) * 5) == []


def test_a_falling_cosine_is_told() -> None:
    assert told([(0.9, 0.5)] * NUM_USUAL + [(0.9, 0.2)] * NUM_LASTING) == [NUM_USUAL + NUM_LASTING - 1]


def test_steps_that_were_not_finite_say_nothing() -> None:
    assert told([(math.nan, math.nan), (math.inf, 0.0)] * 20) == []


def test_figures_of_sums() -> None:
    assert error_and_cosine([0.25, 1.0, 1.0, 0.5]) == (0.5, 0.5)
    assert error_and_cosine([0.0, 0.0, 0.0, 0.0]) == (0.0, 1.0)
    assert error_and_cosine([1.0, 0.0, 1.0, 0.0])[0] == math.inf
    assert error_and_cosine([1.0, 1.0, 0.0, 0.0]) == (1.0, 0.0)
    error, cosine = error_and_cosine([4.0, 16.0, 9.0, 12.0])
    assert error == pytest.approx(0.5)
    assert cosine == pytest.approx(1.0)
