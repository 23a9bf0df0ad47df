"""Recorded initialisation: every parameter alone, with the bits of the factory run for real."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from closeranks.parallel.initialization.deferred_init import NotRecordable, record
from closeranks.parallel.initialization.tied_tensors import named_tensors
from closeranks.run.dry_run.live_bytes import LiveBytes
from tests.parallel.zoo import FAITHFUL, HANDED_OVER, UNFAITHFUL, Factory, Pretrained, Tables, Vision

SEED = 11


def eager(factory: Factory, seed: int = SEED) -> nn.Module:
    torch.manual_seed(seed)
    return factory()


@pytest.mark.parametrize("name", FAITHFUL)
def test_every_tensor_alone_has_the_factorys_own_bits(name: str) -> None:
    whole = eager(FAITHFUL[name])
    recording = record(FAITHFUL[name], SEED)
    expected = dict(named_tensors(whole))
    assert list(recording.views) == list(expected)
    for key in reversed(expected):  # in any order
        value = recording.value(key)
        assert value.dtype == expected[key].dtype, key
        assert value.stride() == expected[key].stride(), key
        assert torch.equal(value, expected[key]), key


@pytest.mark.parametrize("name", FAITHFUL)
def test_the_module_is_the_factorys_but_without_data(name: str) -> None:
    whole, module = eager(FAITHFUL[name]), record(FAITHFUL[name], SEED).module
    assert [key for key, _ in module.named_modules()] == [key for key, _ in whole.named_modules()]
    assert [key for key, _ in module.named_parameters()] == [key for key, _ in whole.named_parameters()], "ties"
    assert list(module.state_dict()) == list(whole.state_dict())
    for (key, bare), (_, full) in zip(named_tensors(module), named_tensors(whole), strict=True):
        assert bare.is_meta, key
        assert (bare.shape, bare.dtype) == (full.shape, full.dtype), key
        assert bare.requires_grad == full.requires_grad, key
        assert type(bare) is type(full), key


def test_what_python_asked_for_is_what_it_got() -> None:
    module = record(Vision, SEED).module
    assert module.rates == eager(Vision).rates
    assert module.more == eager(Vision).more


def test_plain_attributes_get_their_values() -> None:
    module, whole = record(Tables, SEED).module, eager(Tables)
    assert torch.equal(module.scale, whole.scale)
    for own, other in zip(module.grid["rows"], whole.grid["rows"], strict=True):
        assert type(own) is Tensor
        assert torch.equal(own, other)


@pytest.mark.parametrize("name", UNFAITHFUL)
def test_what_cannot_be_recorded_is_refused(name: str) -> None:
    with pytest.raises(NotRecordable):
        record(UNFAITHFUL[name], SEED)


def test_a_module_that_was_handed_over_is_left_alone() -> None:
    before = HANDED_OVER.weight
    with pytest.raises(NotRecordable, match="existed before"):
        record(lambda: HANDED_OVER, SEED)
    assert HANDED_OVER.weight is before
    assert not before.is_meta


def test_a_loaded_checkpoint_is_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    torch.save(nn.Linear(3, 3).state_dict(), tmp_path / "weights.pt")

    def factory() -> nn.Module:
        module = nn.Linear(3, 3)
        module.load_state_dict(torch.load(tmp_path / "weights.pt"))
        return module

    with pytest.raises(NotRecordable):
        record(factory, SEED)


def test_a_refused_factory_finds_the_outer_randomness_as_it_was() -> None:
    drawn: list[float] = []

    def factory() -> nn.Module:
        drawn.append(np.random.random() + random.random())
        return nn.Linear(2, 2, bias=bool(torch.ones(2).numpy()[0]))

    with pytest.raises(NotRecordable):
        record(factory, SEED)
    factory()
    assert drawn[0] == drawn[1]


def test_the_generator_is_not_moved_by_a_draw() -> None:
    recording = record(FAITHFUL["post init"], SEED)
    before = torch.get_rng_state()
    recording.value("norm.weight")
    recording.value("head.weight")
    assert torch.equal(torch.get_rng_state(), before)


def test_fingerprints_tell_recordings_apart() -> None:
    def of(value: float) -> Factory:
        def factory() -> nn.Module:
            module = nn.Linear(3, 3)
            module.bias.data = torch.tensor([1.0, 2.0, value])
            return module

        return factory

    assert record(of(1.0), SEED).fingerprint == record(of(1.0), SEED).fingerprint
    assert record(of(1.0), SEED).fingerprint != record(of(1.5), SEED).fingerprint
    assert record(lambda: nn.Linear(3, 4), SEED).fingerprint != record(lambda: nn.Linear(3, 3), SEED).fingerprint


def test_one_parameter_at_a_time_is_all_that_lives() -> None:
    """Even where the factory fills everything before it changes everything."""

    def factory() -> nn.Module:
        return Pretrained(num_layers=8, dim=64)

    sizes = {name: p.numel() * 4 for name, p in eager(factory).named_parameters()}
    with LiveBytes() as live:
        eager(factory)
        assert live.peak >= sum(sizes.values()), "the control: built for real, all of it lives at once"
        live.rest()
        recording = record(factory, SEED)
        for name in sizes:
            recording.value(name)
    num_draws = len(recording.program.draws)
    assert live.peak < 2 * max(sizes.values()) + 8192 * num_draws
    assert live.peak < sum(sizes.values()) / 2
