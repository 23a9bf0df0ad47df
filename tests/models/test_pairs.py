"""The two-tower model: two inputs, two losses, one weight."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from closeranks.core.errors import ModelError
from closeranks.core.protocols import ModelSpec
from closeranks.facts.shapes.pairs import flops_per_sample, parameter_shapes
from closeranks.models.build import spec_for
from closeranks.models.config import PairsConfig

from .making import materialised


def batch(count: int = 256) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    user, item = (torch.randn(count, 16, generator=generator) for _ in range(2))
    score = (user * item).mean(dim=1) * 4
    return {"user": user, "item": item, "click": (score > 0).float(), "rating": score}


def test_parameters_are_those_facts_say() -> None:
    config = PairsConfig(user_dim=3, item_dim=5)
    module = materialised(spec_for(config, seq_len=0))
    found = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    assert list(found.items()) == list(parameter_shapes(config.shape()).items())


def test_flops_are_those_torch_counts() -> None:
    config = PairsConfig()
    spec = spec_for(config, seq_len=0)
    module = materialised(spec)
    with FlopCounterMode(display=False) as counter:
        spec.loss(module, batch(4)).total.backward()
    assert counter.get_total_flops() == 4 * flops_per_sample(config.shape()) == 4 * spec.flops_per_item


def test_total_is_both_losses_as_sums() -> None:
    spec = spec_for(PairsConfig(rating_weight=0.5), seq_len=0)
    assert isinstance(spec, ModelSpec)
    module = materialised(spec, dtype=torch.float64)
    data = {key: value.double() for key, value in batch(10).items()}
    whole = spec.loss(module, data)
    click, rating = whole.metrics["click_loss"], whole.metrics["rating_loss"]
    assert set(whole.metrics) == set(spec.metrics)
    assert whole.weight == 10
    assert whole.total.item() == pytest.approx(float(click) + 0.5 * float(rating), rel=1e-12)
    parts = [spec.loss(module, {key: value[rows] for key, value in data.items()}) for rows in (slice(3), slice(3, 10))]
    assert sum(float(part.metrics["rating_loss"]) for part in parts) == pytest.approx(float(rating), rel=1e-12)
    assert sum(part.total.item() for part in parts) == pytest.approx(whole.total.item(), rel=1e-12)


def test_both_losses_fall() -> None:
    spec = spec_for(PairsConfig(), seq_len=0)
    module = materialised(spec)
    data = batch()
    first = spec.loss(module, data).metrics
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for _ in range(100):
        loss = spec.loss(module, data)
        (loss.total / loss.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    last = spec.loss(module, data).metrics
    assert float(last["click_loss"]) < 0.5 * float(first["click_loss"])
    assert float(last["rating_loss"]) < 0.5 * float(first["rating_loss"])


def test_other_widths_are_explained() -> None:
    spec = spec_for(PairsConfig(item_dim=9), seq_len=0)
    with pytest.raises(ModelError, match="16 user and 16 item features, the model reads 16 and 9"):
        spec.loss(materialised(spec), batch())
