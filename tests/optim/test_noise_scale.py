from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from closeranks.core.errors import CheckpointError
from closeranks.optim.noise_scale import NoiseMeasurement, NoiseScaleAverages


def expected(batch: int, signal: float, spread: float) -> float:
    return signal + spread / batch


@pytest.mark.parametrize(("small", "big"), [(1, 2), (4, 64), (16, 24)])
def test_what_is_expected_of_two_batches_gives_both_back(small: int, big: int) -> None:
    measured = NoiseMeasurement(small, big, expected(small, 0.25, 120.0), expected(big, 0.25, 120.0))
    assert measured.signal == pytest.approx(0.25)
    assert measured.spread == pytest.approx(120.0)
    assert NoiseScaleAverages().add(measured).scale == pytest.approx(480.0)


def test_drawn_gradients_give_their_noise_scale() -> None:
    """One sample's gradient: a fixed direction and independent noise of a known covariance."""
    generator = torch.Generator().manual_seed(3)
    truth, deviation = torch.full((400,), 0.2, dtype=torch.float64), 3.0
    found = NoiseScaleAverages()
    for _ in range(100):
        samples = truth + deviation * torch.randn(64, 400, dtype=torch.float64, generator=generator)
        small, big = samples[:8].mean(0).square().sum(), samples.mean(0).square().sum()
        found = found.add(NoiseMeasurement(8, 64, float(small), float(big)))
    exact = 400 * deviation**2 / float(truth.square().sum())
    assert found.scale == pytest.approx(exact, rel=0.3)


def test_averages_are_made_before_the_division() -> None:
    """Single estimates scatter around the truth, below zero too: their ratios would average to anything."""
    rows = [NoiseMeasurement(1, 2, 10.0, 9.5), NoiseMeasurement(1, 2, 10.0, 4.0), NoiseMeasurement(1, 2, 10.0, 6.5)]
    assert rows[1].signal < 0
    found = NoiseScaleAverages()
    for row in rows:
        found = found.add(row)
    weights = [0.95**2, 0.95, 1.0]
    spread = sum(w * row.spread for w, row in zip(weights, rows, strict=True))
    signal = sum(w * row.signal for w, row in zip(weights, rows, strict=True))
    assert found.scale == pytest.approx(spread / signal)


def test_too_noisy_to_tell() -> None:
    assert NoiseScaleAverages().scale is None
    assert NoiseScaleAverages().add(NoiseMeasurement(1, 2, 10.0, 4.0)).scale is None
    assert NoiseScaleAverages().add(NoiseMeasurement(1, 2, 3.0, 4.0)).scale is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_counts_nothing(bad: float) -> None:
    before = NoiseScaleAverages(1.0, 2.0)
    assert before.add(NoiseMeasurement(1, 2, bad, 1.0)) == before
    assert before.add(NoiseMeasurement(1, 2, 1.0, bad)) == before


def test_the_state_goes_through_json_whole() -> None:
    found = NoiseScaleAverages(0.1 + 0.2, 1 / 3)
    assert NoiseScaleAverages.of_state(json.loads(json.dumps(found.state()))) == found


@pytest.mark.parametrize("state", [{"signal": 1.0}, {"signal": 1.0, "noise": 2.0}])
def test_a_foreign_state_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="noise scale's state"):
        NoiseScaleAverages.of_state(state)
