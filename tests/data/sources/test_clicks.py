from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from closeranks.data.config import ClicksDataConfig
from closeranks.data.sources.open import open_source

CONFIG = ClicksDataConfig(num_samples=4000, num_dense=3, features=4, rows=50, max_ids=3)
SOURCE = open_source(CONFIG, "train", 0)
WHOLE = SOURCE.read(np.arange(4000))


def test_shapes() -> None:
    assert {name: (tuple(value.shape), value.dtype) for name, value in WHOLE.items()} == {
        "dense": ((4000, 3), torch.float32),
        "ids": ((4000, 4, 3), torch.int64),
        "click": ((4000,), torch.float32),
        "probability": ((4000,), torch.float32),
    }


@given(st.lists(st.integers(0, 3999), min_size=1, max_size=9))
def test_a_sample_follows_from_its_index_alone(indices: list[int]) -> None:
    batch = SOURCE.read(np.array(indices))
    for name, value in batch.items():
        assert torch.equal(value, WHOLE[name][indices])


def test_the_data_never_change() -> None:
    """Pinned sums: the samples stay the same with every numpy, on every machine."""
    assert WHOLE["dense"].double().sum().item() == pytest.approx(PINNED_DENSE, rel=1e-12)
    assert (int(WHOLE["ids"].sum()), int(WHOLE["click"].sum())) == (PINNED_IDS, PINNED_CLICKS)


def test_bags_have_one_to_three_ids_and_then_none() -> None:
    there = WHOLE["ids"] >= 0
    assert there[:, :, 0].all()
    assert torch.equal(there, there.int().cummin(dim=2).values.bool())
    lengths = torch.bincount(there.sum(2).flatten(), minlength=4)
    assert (lengths[1:] > 0.3 * lengths.sum()).all()


@pytest.mark.parametrize("zipf", [0.0, 1.0, 1.3])
def test_ids_have_zipf_frequencies(zipf: float) -> None:
    """The mass of the power law between two whole numbers, for every id."""
    source = open_source(ClicksDataConfig(num_samples=40_000, features=3, rows=20, zipf=zipf), "train", 0)
    ids = source.read(np.arange(40_000))["ids"].numpy().ravel()
    places = np.arange(1, 22)
    mass = np.diff(np.log(places) if zipf == 1 else places ** (1 - zipf) / (1 - zipf))
    expected = mass / mass.sum()
    found = np.bincount(ids, minlength=20) / len(ids)
    assert np.abs(found - expected).max() < 4 * np.sqrt(expected.max() / len(ids))


def test_clicks_follow_their_probabilities() -> None:
    click, probability = WHOLE["click"].double(), WHOLE["probability"].double()
    spread = (probability * (1 - probability)).sum().sqrt()
    assert abs((click - probability).sum()) < 3 * spread
    order = probability.argsort()
    for tenth in order.chunk(10):
        spread = (probability[tenth] * (1 - probability[tenth])).sum().sqrt()
        assert abs((click - probability)[tenth].sum()) < 4 * spread


def test_the_probability_is_that_of_the_documented_model() -> None:
    """The formula of the docstring, written once more for one sample at a time."""
    log = SOURCE._log  # type: ignore[attr-defined]
    dense, ids, _, probability = log.draw(np.arange(5))
    without = log.logit(np.zeros_like(dense), ids)
    for number in range(5):
        alone = log.logit(dense[number : number + 1], ids[number : number + 1])[0]
        assert 1 / (1 + np.exp(-alone)) == pytest.approx(probability[number], rel=1e-12)
    scale = 0.4 * log.signal
    ratio = (log.logit(dense, ids) - without) / (log.logit(2 * dense, ids) - without)
    assert ratio == pytest.approx(np.full(5, 0.5))
    assert np.abs(log.logit(dense, ids) - without).max() < scale * 3**0.5 * 3**0.5
    shuffled = ids[:, :, ::-1].copy()
    assert log.logit(dense, shuffled) == pytest.approx(log.logit(dense, ids)), "the order in a bag says nothing"


def test_signal_decides_how_much_can_be_learned() -> None:
    for signal, spread in ((0.0, 0.0), (2.0, 2.0)):
        source = open_source(ClicksDataConfig(num_samples=20_000, signal=signal), "train", 0)
        probability = source.read(np.arange(20_000))["probability"].double()
        assert probability.logit().std().item() == pytest.approx(spread, rel=0.15, abs=1e-6)


def test_another_seed_is_another_log() -> None:
    other = open_source(CONFIG.model_copy(update={"log_seed": 1}), "train", 0)
    assert other.identity != SOURCE.identity
    assert not torch.equal(other.read(np.arange(9))["ids"], WHOLE["ids"][:9])


def test_evaluation_samples_are_others_of_the_same_log() -> None:
    held_out = open_source(CONFIG, "eval", 0)
    assert held_out is not None
    assert len(held_out) == 400
    longer = open_source(CONFIG.model_copy(update={"num_samples": 5000}), "train", 0)
    assert torch.equal(held_out.read(np.arange(400))["dense"], longer.read(np.arange(4000, 4400))["dense"])
    assert held_out.identity != SOURCE.identity
    assert open_source(ClicksDataConfig(eval_fraction=0), "eval", 0) is None


PINNED_DENSE = -61.628720405176864
PINNED_IDS = 327811
PINNED_CLICKS = 1809
