"""The convnet: it learns, it counts right answers, and facts know its shape."""

from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils.flop_counter import FlopCounterMode

from closeranks.core.protocols import ModelSpec
from closeranks.facts.shapes.digits import flops_per_sample, parameter_shapes
from closeranks.models.build import spec_for
from closeranks.models.config import DigitsConfig

from .making import materialised


def images() -> dict[str, torch.Tensor]:
    digits = load_digits()
    image = torch.from_numpy(digits.images).float().view(-1, 1, 8, 8) / 16
    return {"image": image, "label": torch.from_numpy(digits.target)}


def test_parameters_are_those_facts_say() -> None:
    config = DigitsConfig(channels=5, hidden_dim=7)
    module = materialised(spec_for(config, seq_len=0))
    found = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    assert list(found.items()) == list(parameter_shapes(config.shape()).items())


def test_flops_are_those_torch_counts() -> None:
    config = DigitsConfig()
    spec = spec_for(config, seq_len=0)
    module = materialised(spec)
    batch = {key: value[:4] for key, value in images().items()}
    with FlopCounterMode(display=False) as counter:
        spec.loss(module, batch).total.backward()
    assert counter.get_total_flops() == 4 * flops_per_sample(config.shape()) == 4 * spec.flops_per_item


def test_running_statistics_start_clean_after_the_meta_device() -> None:
    module = materialised(spec_for(DigitsConfig(), seq_len=0))
    assert torch.equal(module.stem.norm.running_mean, torch.zeros(16))  # type: ignore[union-attr,arg-type]
    assert torch.equal(module.stem.norm.running_var, torch.ones(16))  # type: ignore[union-attr,arg-type]
    assert int(module.stem.norm.num_batches_tracked) == 0  # type: ignore[union-attr,arg-type]


@pytest.mark.slow
def test_learns_to_read_digits() -> None:
    spec = spec_for(DigitsConfig(dropout=0.1), seq_len=0)
    assert isinstance(spec, ModelSpec)
    module = materialised(spec)
    torch.manual_seed(0)
    shuffled = torch.randperm(1797)
    train, test = shuffled[:1440], shuffled[1440:]
    data = images()
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    for step in range(200):
        chosen = train[torch.arange(step * 64, step * 64 + 64) % len(train)]
        loss = spec.loss(module, {key: value[chosen] for key, value in data.items()})
        (loss.total / loss.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    module.eval()
    with torch.no_grad():
        result = spec.loss(module, {key: value[test] for key, value in data.items()})
    assert set(result.metrics) == set(spec.metrics) == {"accuracy"}
    assert float(result.metrics["accuracy"]) / float(result.weight) > 0.95
