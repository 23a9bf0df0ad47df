"""Chooses the FSDP units of a model and applies FSDP2 to them (zero=3).

[Note: units] A unit is a module whose parameters are all-gathered in one collective, around its forward and its
backward. The model's blocks are units; where a model names none, the largest modules that are a small share of it.
Everything else belongs to the root, which stays gathered from its forward to the end of its backward. Choosing is a
pure function of names and sizes. Every forward of a unit is a collective: all ranks must run the same units in the same
order. Invariants: a parameter that two modules share is in one unit with both; all ranks choose the same units.

[Note: number formats] Weights stay float32 (float64 in proofs), gathered or not, and autocast casts the operands of
products, as in every other layout: FSDP2's ``param_dtype`` would give half-precision weights to norms that refuse them,
and change the residual stream's dtype. In bf16 runs a block's weights are rounded before they are all-gathered, which
halves the traffic and changes no product, since autocast rounds them in the same way; norms' weights inside blocks are
rounded too. Not in fp16 runs: small values in a norm or a bias would be lost. Gradients have the weights' dtype and
are reduced in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from closeranks.core.traffic import count_collective
from closeranks.parallel.precision import Precision

LARGEST_SHARE = 1 / 4
"""Largest share of all parameters in one automatic unit: with more gathered at once, little memory would be saved."""
SMALLEST_SHARE = 1 / 100
"""Smaller modules are not worth a collective of their own and stay with the root."""


@dataclass(frozen=True, slots=True)
class ModuleFacts:
    """The facts about a module from which units are chosen."""

    name: str
    own: tuple[tuple[str, int], ...]
    """First name and size of each parameter that it holds directly, not through a child."""
    runs: bool = True
    """Whether it has a forward, around which weights can be gathered; an nn.ModuleList has none."""
    is_open: bool = True
    """Whether units may be chosen inside it; some modules use their children's weights without calling them."""


def describe_modules(module: nn.Module) -> tuple[ModuleFacts, ...]:
    """All modules below and including this one, parents first, in the order they were registered."""
    first: dict[nn.Parameter, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first.setdefault(parameter, name)
    return tuple(
        ModuleFacts(
            name,
            tuple((first[p], p.numel()) for p in part.parameters(recurse=False)),
            runs="forward" in vars(part) or type(part).forward is not nn.Module.forward,
            is_open=isinstance(part, nn.Sequential | nn.ModuleList | nn.ModuleDict)
            or not type(part).__module__.startswith("torch.nn."),
        )
        for name, part in module.named_modules()
    )


def choose_fsdp_units(modules: Sequence[ModuleFacts], blocks: Sequence[str]) -> tuple[str, ...]:
    """Names of the modules that are units besides the root, in their order: the blocks, if there are any."""
    tree = _Tree(modules)
    chosen = {name for name in blocks if tree.can_be_unit(name)}
    most, least = LARGEST_SHARE * tree.size(""), SMALLEST_SHARE * tree.size("")
    waiting = [] if blocks else tree.children("")
    while waiting:
        name = waiting.pop()
        children = tree.children(name)
        if tree.size(name) < least:
            continue
        if tree.can_be_unit(name) and (tree.size(name) <= most or not children):
            chosen.add(name)
        else:
            waiting += children
    return tuple(facts.name for facts in modules if facts.name in chosen)


class _Tree:
    def __init__(self, modules: Sequence[ModuleFacts]) -> None:
        self._facts = {facts.name: facts for facts in modules}
        self._owners: dict[str, list[str]] = {}
        for facts in modules:
            for parameter, _ in facts.own:
                self._owners.setdefault(parameter, []).append(facts.name)

    def size(self, name: str) -> int:
        return sum({parameter: size for facts in self._below(name) for parameter, size in facts.own}.values())

    def can_be_unit(self, name: str) -> bool:
        """Whether it has a forward and shares no parameter with a module outside of it."""
        parameters = [parameter for facts in self._below(name) for parameter, _ in facts.own]
        owners = (owner for parameter in parameters for owner in self._owners[parameter])
        return self._facts[name].runs and bool(parameters) and all(_is_inside(owner, name) for owner in owners)

    def children(self, name: str) -> list[str]:
        """Its children; empty where units must not be chosen inside."""
        if not self._facts[name].is_open:
            return []
        return [other for other in self._facts if other and other != name and other.rpartition(".")[0] == name]

    def _below(self, name: str) -> Iterator[ModuleFacts]:
        return (facts for facts in self._facts.values() if _is_inside(facts.name, name))


def _is_inside(name: str, outer: str) -> bool:
    return not outer or name == outer or name.startswith(f"{outer}.")


def shard_fully(
    module: nn.Module,
    blocks: Sequence[str],
    mesh: DeviceMesh,
    *,
    precision: Precision,
    hold: str,
    prefetch: int,
    overlap: bool = True,
) -> tuple[str, ...]:
    """Shard every parameter by rows over ``mesh``, in place, and return the names of the units.

    ``mesh`` is the shard axis, or replica and shard axes (HSDP). The module may be on the meta device. ``hold``:
    ``shards`` frees a unit's weights after each use, ``step`` keeps them until the step is over. While one unit
    computes, the next ``prefetch`` are gathered; without ``overlap`` none is, and nothing runs during an all-gather.
    """
    units = choose_fsdp_units(describe_modules(module), blocks)
    # FSDP2 shards rows of contiguous tensors: other memory formats are lost, and 0-dim parameters stay whole.
    whole = {parameter for parameter in module.parameters() if parameter.ndim == 0}
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()
    for name in units:
        # The last unit's backward follows its forward immediately: freeing it in between would gather it twice.
        frees = hold == "shards" and name != units[-1]
        fully_shard(module.get_submodule(name), mesh=mesh, reshard_after_forward=frees, ignored_params=whole)
    fully_shard(module, mesh=mesh, reshard_after_forward=False, ignored_params=whole)
    if hold == "shards":
        for layer in module.modules():
            if getattr(layer, "keeps_cast", False):  # it casts its weight to half precision for products
                layer.keeps_cast = False  # type: ignore[assignment]  # any attribute may be set on a module
    parts = [_sharded(module, name) for name in ("", *units)]
    for name, part in zip(("", *units), parts, strict=True):
        _add_up(part)
        narrow = precision.compute if precision.name == "bf16" and name in blocks else None
        part.set_custom_all_gather(_CountedGather(narrow))  # type: ignore[arg-type]  # its class is private
    _look_ahead(parts, prefetch if overlap else 0)
    # On the CPU only an asynchronous all-gather overlaps with other work; on CUDA it is the one that does not.
    parts[0]._set_unshard_async_op(overlap == (mesh.device_type == "cpu"))
    return units


def _sharded(module: nn.Module, name: str) -> FSDPModule:
    part = module.get_submodule(name)
    assert isinstance(part, FSDPModule)
    return part


def _add_up(part: FSDPModule) -> None:
    """Reduce gradients by summing, also where only some ranks used a parameter; Gloo has no other reduction."""
    part.set_gradient_divide_factor(1.0)
    part.set_force_sum_reduction_for_comms(True)
    if hasattr(part, "set_reduce_scatter_unused_params"):  # from torch 2.13 on
        part.set_reduce_scatter_unused_params(True, recurse=False)
        return
    state: Any = part._get_fsdp_state()
    for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
        if group is not None:
            group.post_backward = partial(_after_backward, group, group.post_backward)


def _after_backward(group: Any, reduce: Callable[..., None], *unused: Any) -> None:
    """Does what later versions of torch do: a rank whose samples did not use a parameter sends zeros for it. Otherwise
    it would leave the parameter out, and ranks would sum gradients of different parameters."""
    for one in group.fsdp_params if group.reduce_grads else ():
        gathered = getattr(one, "_unsharded_param", None)
        if gathered is not None and gathered.requires_grad and one.unsharded_accumulated_grad is None:
            gathered.grad = torch.zeros_like(gathered) if gathered.grad is None else gathered.grad
    reduce(*unused)


def _look_ahead(parts: Sequence[FSDPModule], prefetch: int) -> None:
    """Set the prefetch order: the root, then the units in order. With no list FSDP2 prefetches one unit in backward by
    itself; a unit that lists only itself, which is gathered by then, prefetches nothing."""
    root, *units = parts
    root.set_modules_to_forward_prefetch(units[:prefetch])
    root.set_modules_to_backward_prefetch(units[::-1][:prefetch] or [root])
    for number, unit in enumerate(units):
        before = units[:number][::-1]
        unit.set_modules_to_forward_prefetch(units[number + 1 :][:prefetch])
        unit.set_modules_to_backward_prefetch(before[:prefetch] or [unit])


class _CountedGather:
    """FSDP2's ``AllGather``, counted; with a ``narrow`` dtype it casts before it sends, and back on arrival."""

    def __init__(self, narrow: torch.dtype | None) -> None:
        self._narrow = narrow

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        if self._narrow is None:
            count_collective("data", "all-gather", group.size(), output_tensor)
            whole: dist.Work | None = gather(output_tensor, input_tensor, group=group, async_op=async_op)
            return whole
        narrow = torch.empty_like(output_tensor, dtype=self._narrow)
        count_collective("data", "all-gather", group.size(), narrow)
        work = gather(narrow, input_tensor.to(self._narrow), group=group, async_op=async_op)
        pending = _PendingGather(work, narrow, output_tensor)
        if async_op:
            return pending
        pending.wait()
        return None


class _PendingGather(dist.Work):
    """A pending all-gather whose result is cast back when it is waited for."""

    def __init__(self, work: dist.Work | None, narrow: Tensor, output: Tensor) -> None:
        super().__init__()
        self._work, self._narrow, self._output = work, narrow, output

    def wait(self, timeout: Any = None) -> bool:
        if self._work is not None:
            self._work.wait()
        self._output.copy_(self._narrow)
        return True
