"""How does a spec become a module with weights?

Built on the meta device and filled parameter by parameter, each from a stream keyed by (seed, its name). Invariant: the
initial weights depend on the seed and the names alone, so every layout starts from the same model and no rank ever
needs more memory than the parameters it keeps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from closeranks.core.keys import derive_seed
from closeranks.core.protocols import ModelSpec

Broadcast = Callable[[Tensor], Tensor]


def materialise(
    spec: ModelSpec, *, seed: int, device: torch.device, dtype: torch.dtype, broadcast: Broadcast
) -> nn.Module:
    if spec.builds_on_meta:
        return _fill(spec, seed, device, dtype)
    torch.manual_seed(derive_seed(seed, "init"))
    module = in_format(spec.build(), dtype).to(device)
    with torch.no_grad():  # a factory may draw from numpy or the clock: rank 0's weights are the run's weights
        for tensor in (*module.parameters(), *module.buffers()):
            broadcast(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
    return module


def _fill(spec: ModelSpec, seed: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    with torch.device("meta"):
        module = in_format(spec.build(), dtype)
    ties = _ties(module)
    module.to_empty(device=device)
    for name, alias in ties:
        owner, _, attribute = alias.rpartition(".")
        setattr(module.get_submodule(owner), attribute, module.get_parameter(name))
    generator = torch.Generator(device)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            generator.manual_seed(derive_seed(seed, "init", name))
            spec.init_parameter(name, parameter, generator)
        spec.init_buffers(module)
    return module


def in_format(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Floating tensors in ``dtype``; ``Module.to`` would also cut the imaginary part off complex ones."""
    module._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
    return module


def _ties(module: nn.Module) -> list[tuple[str, str]]:
    """(name, other name) of parameters that are one tensor: ``to_empty`` gives each name storage of its own."""
    first: dict[Tensor, str] = {}
    ties: list[tuple[str, str]] = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter in first:
            ties.append((first[parameter], name))
        else:
            first[parameter] = name
    return ties
