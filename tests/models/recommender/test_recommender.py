"""The recommender: its parameters, its loss, its dot products, and what it says of data that do not fit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from closeranks.core.errors import ModelError
from closeranks.core.protocols import ModelSpec, SampleMetrics
from closeranks.core.seeds import derive_seed
from closeranks.core.table_rows import initial_rows, row_key
from closeranks.data.config import ClicksDataConfig
from closeranks.data.sources.open import open_source
from closeranks.facts.shapes.recommender import flops_per_sample, parameter_shapes
from closeranks.models.build import spec_for
from closeranks.models.config import RecommenderConfig
from closeranks.models.table import row_bound
from tests.models.making import materialised

SMALL = RecommenderConfig(num_dense=3, features=4, rows=50, dim=5, bottom=(7,), top=(6, 4))


def batch(count: int = 64, max_ids: int = 2) -> dict[str, torch.Tensor]:
    config = ClicksDataConfig(num_samples=1000, num_dense=3, features=4, rows=50, max_ids=max_ids)
    return dict(open_source(config, "train", 0).read(np.arange(count)))


def test_parameters_are_those_facts_say() -> None:
    module = materialised(spec_for(SMALL, seq_len=0))
    found = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    assert list(found.items()) == list(parameter_shapes(SMALL.shape()).items())


def test_flops_are_those_torch_counts() -> None:
    spec = spec_for(SMALL, seq_len=0)
    module = materialised(spec)
    with FlopCounterMode(display=False) as counter:
        spec.loss(module, batch(4)).total.backward()
    assert counter.get_total_flops() == 4 * flops_per_sample(SMALL.shape()) == 4 * spec.flops_per_item


def test_it_is_what_the_paper_says() -> None:
    """Vectors, their dot products pair by pair, and two MLPs, one sample at a time."""
    spec = spec_for(SMALL, seq_len=0)
    module = materialised(spec, dtype=torch.float64)
    data = batch(3)
    weight = dict(module.named_parameters())
    for number in range(3):
        hidden = (weight["bottom.0.weight"] @ data["dense"][number].double() + weight["bottom.0.bias"]).relu()
        vectors = [weight["bottom.1.weight"] @ hidden + weight["bottom.1.bias"]]
        for feature in range(4):
            ids = [int(one) for one in data["ids"][number, feature] if one >= 0]
            vectors.append(weight[f"tables.{feature}.weight"][ids].sum(0))
        dots = [left @ right for left, right in itertools.combinations(vectors, 2)]
        hidden = torch.cat([vectors[0], torch.stack(dots)])
        for layer in range(3):
            hidden = weight[f"top.{layer}.weight"] @ (hidden.relu() if layer else hidden) + weight[f"top.{layer}.bias"]
        one = {name: value[number : number + 1].double() for name, value in data.items() if name != "ids"}
        answer = module(one["dense"], data["ids"][number : number + 1])
        assert answer.item() == pytest.approx(hidden.item(), rel=1e-12)


def test_tables_start_with_the_rows_that_a_server_would_give_birth_to() -> None:
    module = materialised(spec_for(SMALL, seq_len=0), seed=5)
    key = row_key(5, "tables.2")
    assert key == derive_seed(5, "init", "tables.2.weight")
    expected = initial_rows(key, np.arange(50), 5, row_bound(5))
    assert np.array_equal(module.get_parameter("tables.2.weight").detach().numpy(), expected)


def test_the_loss_is_a_sum_and_brings_each_samples_score() -> None:
    spec = spec_for(SMALL, seq_len=0)
    assert isinstance(spec, ModelSpec)
    assert isinstance(spec, SampleMetrics)
    module = materialised(spec, dtype=torch.float64)
    data = {key: value.double() if value.is_floating_point() else value for key, value in batch(10).items()}
    whole = spec.loss(module, data)
    parts = [spec.loss(module, {key: value[rows] for key, value in data.items()}) for rows in (slice(3), slice(3, 10))]
    assert whole.weight == 10
    assert sum(part.total.item() for part in parts) == pytest.approx(whole.total.item(), rel=1e-12)
    assert set(whole.samples) == set(spec.sample_values)
    assert torch.allclose(torch.cat([part.samples["score"] for part in parts]), whole.samples["score"], rtol=1e-12)


def test_the_best_auc_is_only_told_where_it_is_known() -> None:
    spec = spec_for(SMALL, seq_len=0)
    assert isinstance(spec, SampleMetrics)
    module = materialised(spec)
    data = batch()
    assert set(spec.sample_metrics(spec.loss(module, data).samples)) == {"auc", "best_auc", "best_loss"}
    del data["probability"]
    assert set(spec.sample_metrics(spec.loss(module, data).samples)) == {"auc"}


def test_other_sizes_are_explained() -> None:
    for change, words in (
        ({"features": 5}, "the model reads 3 values and 5 features"),
        ({"rows": 9}, r"holds the id \d+, and the tables have 9 rows"),
    ):
        other = spec_for(SMALL.model_copy(update=change), seq_len=0)
        module = materialised(other)
        with pytest.raises(ModelError, match=words):
            other.loss(module, batch())
    hashed = spec_for(SMALL.model_copy(update={"rows": 9, "hashed": True}), seq_len=0)
    assert hashed.loss(materialised(hashed), batch()).total.isfinite()
