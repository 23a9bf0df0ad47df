"""Parameters without a gradient are left alone: against torch, against the published rules, by name and by flag."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from closeranks.optim.optimizer import Optimizer, freeze, whole_parameters
from tests.optim import test_layerwise, test_optimizer
from tests.optim.test_optimizer import ONE, ZERO, build, config, everything, fill, model, plain, restore

# By step: embed.weight, mid.weight, mid.bias, norm.weight, norm.bias.
PATTERN = [{"mid.weight"}, set(), {"mid.weight", "norm.bias"}, {"embed.weight", "mid.bias"}, set(), {"norm.bias"}]
NEVER = "norm.weight"


def absences() -> Iterator[tuple[int, set[str]]]:
    return ((step, {*names, NEVER}) for step, names in enumerate(PATTERN))


def zeroed(module: nn.Module, step: int, absent: set[str]) -> list[Tensor]:
    """As a reducer leaves them: of zeros where no rank had a gradient."""
    gradients = fill(module, step)
    for (name, _), gradient in zip(module.named_parameters(), gradients, strict=True):
        if name in absent:
            gradient.zero_()
    return gradients


@pytest.mark.parametrize(("keys", "rule", "options"), test_optimizer.RULES)
def test_as_torch_does(keys: dict[str, Any], rule: Any, options: dict[str, Any]) -> None:
    ours, theirs = model(torch.float64), model(torch.float64)
    optimizer = build(ours, config(weight_decay=0.2, **keys), num_steps=len(PATTERN))
    reference = plain(theirs, rule, decay=0.2, lr=0.01, **options)
    for step, absent in absences():
        optimizer.step(step, zeroed(ours, step, absent), ONE, ONE, unused=absent)
        fill(theirs, step)
        for name in absent:
            theirs.get_parameter(name).grad = None
        reference.step()
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("keys", test_layerwise.RULES)
def test_as_the_published_rules_do(keys: dict[str, Any]) -> None:
    module, reference = model(torch.float64), test_layerwise.plain(keys)
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer = build(module, config(weight_decay=0.2, **keys), num_steps=len(PATTERN))
    for step, absent in absences():
        gradients = zeroed(module, step, absent)
        for (name, w), gradient in zip(weights.items(), gradients, strict=True):
            if name not in absent:
                reference.step(name, w, gradient)
        optimizer.step(step, gradients, ONE, ONE, unused=absent)
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(parameter.detach(), weights[name], rtol=1e-12, atol=1e-12)


GATED = [{"name": "adamw"}, {"name": "sgd"}, {"name": "sgd", "momentum": 0.0}]


@pytest.mark.parametrize(("keys", "frozen_from"), [*((keys, None) for keys in GATED), (GATED[0], 2)])
def test_a_flag_on_the_device_does_the_same_bit_for_bit(keys: dict[str, Any], frozen_from: int | None) -> None:
    """Some parameters are gated and updated, as where another rank had a gradient."""
    named, gated = model(), model()
    settings = config(weight_decay=0.2, **keys)
    by_name = build_frozen(named, settings, frozen_from)
    by_flag = build_frozen(gated, settings, frozen_from)
    for step, absent in absences():
        flags = dict.fromkeys(absent, ZERO) | {"embed.weight": ZERO if "embed.weight" in absent else ONE}
        by_name.step(step, zeroed(named, step, absent), ONE, ONE, unused=absent)
        by_flag.step(step, zeroed(gated, step, absent), ONE, ONE, gates=flags)
        assert everything(named, by_name) == everything(gated, by_flag)
    before = everything(gated, by_flag)
    by_flag.step(len(PATTERN), zeroed(gated, 0, set()), torch.tensor(float("nan")), ZERO, gates={"mid.weight": ONE})
    assert everything(gated, by_flag) == before, "a step that is not taken changes nothing"


def build_frozen(module: nn.Module, settings: Any, frozen_from: int | None) -> Optimizer:
    assignment = freeze(module, settings)
    return Optimizer(whole_parameters(module), assignment, settings, num_steps=9, frozen_from=frozen_from)


@pytest.mark.parametrize("keys", [{"name": "adamw"}, {"name": "lamb"}, {"name": "lars"}, {"name": "sgd"}])
def test_counts_of_their_own_survive_a_restore(keys: dict[str, Any]) -> None:
    through, first, second = model(), model(), model()
    settings = config(weight_decay=0.2, **keys)
    optimizers = [build(module, settings, num_steps=9) for module in (through, first, second)]
    for step, absent in absences():
        optimizers[0].step(step, zeroed(through, step, absent), ONE, ONE, unused=absent)
        if step == 2:
            second.load_state_dict(first.state_dict())
            restore(optimizers[2], optimizers[1])
        mine = (first, optimizers[1]) if step < 2 else (second, optimizers[2])
        mine[1].step(step, zeroed(mine[0], step, absent), ONE, ONE, unused=absent)
    assert everything(second, optimizers[2]) == everything(through, optimizers[0])
    # From here on all have gradients, and no process remembers that it was ever otherwise.
    last = model()
    final = build(last, settings, num_steps=9)
    last.load_state_dict(through.state_dict())
    restore(final, optimizers[0])
    optimizers[0].step(6, fill(through, 6), ONE, ONE)
    final.step(6, fill(last, 6), ONE, ONE)
    assert everything(last, final) == everything(through, optimizers[0])


@pytest.mark.gpu
@pytest.mark.parametrize("keys", GATED)
def test_gates_on_the_gpu_wait_for_nothing(keys: dict[str, Any]) -> None:
    """The same weights as with names on the CPU, and the host never waits."""
    there, here = model().cuda(), model()
    settings = config(weight_decay=0.2, **keys)
    gated, named = build(there, settings, num_steps=9), build(here, settings, num_steps=9)
    one, zero = ONE.cuda(), ZERO.cuda()
    for step, absent in absences():
        gradients = zeroed(there, step, absent)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            gated.step(step, gradients, one, one, gates=dict.fromkeys(absent, zero))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        named.step(step, zeroed(here, step, absent), ONE, ONE, unused=absent)
        for ours, theirs in zip(there.parameters(), here.parameters(), strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=2e-6, atol=2e-6)
