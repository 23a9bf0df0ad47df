from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from closeranks.data.config import PairsDataConfig
from closeranks.data.sources.open import open_source

SOURCE = open_source(PairsDataConfig(num_samples=500, num_features=7), "train", 0)
WHOLE = SOURCE.read(np.arange(500))


def test_shapes() -> None:
    assert {name: tuple(value.shape) for name, value in WHOLE.items()} == {
        "user": (500, 7),
        "item": (500, 7),
        "click": (500,),
        "rating": (500,),
    }
    assert all(value.dtype == torch.float32 for value in WHOLE.values())


@given(st.lists(st.integers(0, 499), min_size=1, max_size=9))
def test_a_sample_follows_from_its_index_alone(indices: list[int]) -> None:
    batch = SOURCE.read(np.array(indices))
    for name, value in batch.items():
        assert torch.equal(value, WHOLE[name][indices])


def test_the_data_never_change() -> None:
    """A pinned sum of the features: the samples stay the same with every numpy, on every machine."""
    assert WHOLE["user"].double().sum().item() == PINNED_USERS
    assert int(WHOLE["click"].sum()) == PINNED_CLICKS


def test_there_is_something_to_learn() -> None:
    clicked = WHOLE["click"] == 1.0
    assert 0.3 < clicked.float().mean() < 0.7
    assert WHOLE["rating"][clicked].mean() > WHOLE["rating"][~clicked].mean() + 0.5
    assert set(WHOLE["click"].tolist()) == {0.0, 1.0}


def test_evaluation_samples_are_others() -> None:
    held_out = open_source(PairsDataConfig(num_samples=500, num_features=7), "eval", 0)
    assert held_out is not None
    assert len(held_out) == 50
    users = {row.numpy().tobytes() for row in WHOLE["user"]}
    assert not users & {row.numpy().tobytes() for row in held_out.read(np.arange(50))["user"]}
    assert held_out.identity != SOURCE.identity
    assert open_source(PairsDataConfig(eval_fraction=0), "eval", 0) is None


PINNED_USERS = -30.646158194402233
PINNED_CLICKS = 240
