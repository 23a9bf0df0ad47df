from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from closeranks.core.errors import DataError
from closeranks.core.protocols import DataSource
from closeranks.data.config import DigitsDataConfig
from closeranks.data.sources.open import open_source


def rows(source: DataSource) -> set[bytes]:
    batch = source.read(np.arange(len(source)))
    return {image.numpy().tobytes() for image in batch["image"]}


def test_shapes_and_range() -> None:
    source = open_source(DigitsDataConfig(), "train", 0)
    batch = source.read(np.array([3, 0, 5]))
    assert (batch["image"].shape, batch["image"].dtype) == ((3, 1, 8, 8), torch.float32)
    assert (batch["label"].shape, batch["label"].dtype) == ((3,), torch.int64)
    everything = source.read(np.arange(len(source)))
    assert (everything["image"].min(), everything["image"].max()) == (0.0, 1.0)
    assert set(everything["label"].tolist()) == set(range(10))


def test_the_parts_are_disjoint_and_whole() -> None:
    train, held_out = (open_source(DigitsDataConfig(), split, 3) for split in ("train", "eval"))
    assert held_out is not None
    assert (len(train), len(held_out)) == (1438, 359)
    assert len(rows(train) | rows(held_out)) == len(rows(train)) + len(rows(held_out)), "no image stands in both"
    assert train.identity != held_out.identity


def test_the_seed_draws_the_parts() -> None:
    first, again, other = (open_source(DigitsDataConfig(), "eval", seed) for seed in (1, 1, 2))
    assert first is not None
    assert again is not None
    assert other is not None
    assert rows(first) == rows(again)
    assert first.identity == again.identity
    assert len(rows(first) & rows(other)) < 150
    assert first.identity != other.identity


def test_no_evaluation_part() -> None:
    config = DigitsDataConfig(eval_fraction=0)
    assert open_source(config, "eval", 0) is None
    assert len(open_source(config, "train", 0)) == 1797


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(DataError, match=r"scikit-learn.*pip install 'closeranks\[digits\]'"):
        open_source(DigitsDataConfig(), "train", 0)
