"""Builds the module of a spec and initializes its weights, sharded or whole.

``build_module`` returns the whole module without data and a source of its initial values. After the module is sharded,
targets say which piece of which parameter this rank kept, and ``init_targets`` initializes them, one whole parameter at
a time. Our own models draw each parameter from a random stream keyed by (seed, name); a user's factory is recorded and
gives the values that it gives when it runs for real (see ``deferred_init``). Invariants: the initial weights depend on
the seed and the model alone, so every layout starts from the same ones; a rank that fills pieces never holds more than
those and one whole parameter, except for a factory that cannot be recorded, which ``BuiltModule.warning`` names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from closeranks.core.errors import ModelError
from closeranks.core.pieces import Piece, narrow_to_piece
from closeranks.core.protocols import ModelSpec
from closeranks.core.seeds import derive_seed
from closeranks.parallel.initialization.deferred_init import NotRecordable, Recording, record
from closeranks.parallel.initialization.tied_tensors import named_tensors, replace_tensors, shared_storage, to_meta
from closeranks.parallel.process_group import RankGroup

Broadcast = Callable[[Tensor], Tensor]


class ParameterInitializer(Protocol):
    """Source of initial values. Call sequence: ``initial_value`` for each piece that ``init_targets`` fills, then
    ``fill_buffers`` once the module's tensors are in place."""

    def initial_value(self, name: str, device: torch.device) -> Tensor:
        """The whole parameter, by its first name. The caller frees it before it asks for the next."""
        ...

    def fill_buffers(self, module: nn.Module) -> None:
        """Initialize every buffer that ``module`` still has."""
        ...


@dataclass(frozen=True, slots=True)
class BuiltModule:
    """A whole module, and the source of its initial values."""

    module: nn.Module
    source: ParameterInitializer
    is_meta: bool
    """False: the module is on the device with its values in place, and nothing is left to fill."""
    warning: str = ""
    """A warning for the user about how it was built."""


@dataclass(frozen=True, slots=True)
class InitTarget:
    """A tensor with storage, and the piece of a parameter whose values it holds."""

    tensor: Tensor
    piece: Piece


def build_module(
    spec: ModelSpec, *, seed: int, device: torch.device, dtype: torch.dtype, group: RankGroup, sharded: bool
) -> BuiltModule:
    """The spec's module, without data where the spec allows it or ``sharded`` says that no rank keeps the whole.

    ``group`` spans all ranks: they agree on whether a factory can be recorded; otherwise all take rank 0's values.
    """
    if spec.builds_on_meta:
        return _on_meta(spec, seed, dtype)
    if not sharded:
        module = _whole(spec, seed, device, dtype, group.broadcast)
        return BuiltModule(module, _Kept(dict(named_tensors(module))), is_meta=False)
    recording, reason = _recorded(spec, seed)
    if _agreed(group, recording.fingerprint if recording else 0, device) and recording:
        return BuiltModule(cast_floating(recording.module, dtype), _Recorded(recording, dtype), is_meta=True)
    # One tensor at a time through the device: not every backend communicates host memory.
    module = _whole(spec, seed, torch.device("cpu"), dtype, lambda own: own.copy_(group.broadcast(own.to(device))))
    if shared := shared_storage(module):
        what = f"{spec.name}: '{shared[0]}' and '{shared[1]}' share memory without being one parameter"
        raise ModelError(what, "Make them one parameter under two names, or use a layout that shards nothing.")
    initializer = _Kept(dict(named_tensors(module)))
    to_meta(module)
    why = f"({reason})" if reason else "(the workers' factories do not agree)"
    warning = f"{spec.name} is built whole in host memory by every worker before it is sharded {why}."
    return BuiltModule(module, initializer, is_meta=True, warning=warning)


def to_empty(module: nn.Module, device: torch.device) -> None:
    """Give every tensor uninitialised storage on a device; ties stay, and so do the shards of sharded parameters."""
    replace_tensors(module, lambda: module.to_empty(device=device))


@torch.no_grad()
def init_targets(targets: Iterable[InitTarget], initializer: ParameterInitializer, device: torch.device) -> None:
    """Initialize every target. Draws each parameter once, whole, and frees it when its pieces are copied."""
    by_name: dict[str, list[InitTarget]] = {}
    for target in targets:
        by_name.setdefault(target.piece.name, []).append(target)
    for name, pieces in by_name.items():
        whole = initializer.initial_value(name, device)
        for target in pieces:
            target.tensor.copy_(narrow_to_piece(whole, target.piece))
        del whole


def materialize(
    spec: ModelSpec, *, seed: int, device: torch.device, dtype: torch.dtype, broadcast: Broadcast
) -> nn.Module:
    """Build the whole module with its values on a device."""
    if not spec.builds_on_meta:
        return _whole(spec, seed, device, dtype, broadcast)
    built = _on_meta(spec, seed, dtype)
    module = built.module
    to_empty(module, device)
    targets = (InitTarget(tensor, Piece.whole(name, tuple(tensor.shape))) for name, tensor in module.named_parameters())
    init_targets(targets, built.source, device)
    with torch.no_grad():
        built.source.fill_buffers(module)
    return module


def cast_floating(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast floating-point tensors to ``dtype``; ``Module.to`` would also drop the imaginary part of complex ones."""
    module._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
    return module


def _on_meta(spec: ModelSpec, seed: int, dtype: torch.dtype) -> BuiltModule:
    with torch.device("meta"):
        module = cast_floating(spec.build(), dtype)
    like = {name: torch.empty_like(parameter) for name, parameter in module.named_parameters()}
    return BuiltModule(module, _Keyed(spec, seed, like), is_meta=True)


def _whole(spec: ModelSpec, seed: int, device: torch.device, dtype: torch.dtype, broadcast: Broadcast) -> nn.Module:
    torch.manual_seed(derive_seed(seed, "init"))
    module = cast_floating(spec.build(), dtype).to(device)
    with torch.no_grad():  # a factory may use numpy's random numbers or the clock: rank 0's weights are the run's
        for tensor in (*module.parameters(), *module.buffers()):
            broadcast(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
    return module


def _recorded(spec: ModelSpec, seed: int) -> tuple[Recording | None, str]:
    try:
        return record(spec.build, derive_seed(seed, "init")), ""
    except NotRecordable as signal:
        return None, str(signal)


def _agreed(group: RankGroup, fingerprint: int, device: torch.device) -> bool:
    """Whether all ranks could record the factory, and recorded the same operations."""
    own = torch.tensor([fingerprint], device=device)
    differs = (group.broadcast(own.clone()) != own) | (own == 0)
    return int(group.sum(differs.long())) == 0


@dataclass(frozen=True, slots=True)
class _Keyed:
    """Values of one of our models: every parameter from a random stream of its own."""

    spec: ModelSpec
    seed: int
    like: Mapping[str, Tensor]
    """Shapes and dtypes of the whole parameters, without data."""

    def initial_value(self, name: str, device: torch.device) -> Tensor:
        generator = torch.Generator(device).manual_seed(derive_seed(self.seed, "init", name))
        whole = torch.empty_like(self.like[name], device=device)
        with torch.no_grad():
            self.spec.init_parameter(name, whole, generator)
        return whole

    def fill_buffers(self, module: nn.Module) -> None:
        self.spec.init_buffers(module)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Values of a recorded user factory: the same bits that it gives when it runs for real."""

    recording: Recording
    dtype: torch.dtype

    def initial_value(self, name: str, device: torch.device) -> Tensor:
        value = self.recording.value(name)
        return value.to(device, self.dtype if value.is_floating_point() else value.dtype)

    def fill_buffers(self, module: nn.Module) -> None:
        _copy_buffers(self, module)


@dataclass(frozen=True, slots=True)
class _Kept:
    """Values of a user factory that had to run for real: all of them stay in host memory until this is freed."""

    tensors: Mapping[str, Tensor]

    def initial_value(self, name: str, device: torch.device) -> Tensor:
        return self.tensors[name].detach().to(device)

    def fill_buffers(self, module: nn.Module) -> None:
        _copy_buffers(self, module)


def _copy_buffers(initializer: ParameterInitializer, module: nn.Module) -> None:
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(initializer.initial_value(name, buffer.device))
