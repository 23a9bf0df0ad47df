"""Traces any torch module on tensors without data, and says what one of its samples costs.

The module is copied without its data; forward and backward of two and of three equal samples run on fake tensors, and
every operation is seen with its shapes. What grows from two samples to three belongs to a sample, the rest to every
micro-batch. Invariants: module, batch and random streams stay as they are; nothing is guessed: what has no known cost,
or cannot run without data, is named in ``ModuleTrace.untraced``.

[Note: whose operation] In forward, an operation belongs to the unit that is running. Autograd numbers its nodes in the
order of forward, so in backward it belongs to the unit in whose forward the running node was made.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from closeranks.core.protocols import Batch, Loss
from closeranks.facts.shapes.module_trace import ModuleTrace, Product, TracedUnit
from closeranks.models.flop_count import (
    DatalessModule,
    NotCountable,
    copy_without_data,
    dataless_settings,
    guarded,
    reason,
)

NUM_SAMPLES = (2, 3)
"""Two, since batch norms refuse a single one."""
_REST = ""
_SILENT = frozenset({"prim", "prims", "profiler"})
"""Namespaces whose operations compute nothing."""
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional"})
_MM, _ADDMM = frozenset({"mm", "_int_mm"}), frozenset({"addmm", "_addmm_activation", "_scaled_mm"})
_BMM = {"bmm": 0, "baddbmm": 1}
"""Where the operands stand among the arguments."""
_ROWS_ALONE = frozenset({"embedding", "index", "index_select", "gather"})
"""Operations that read as much of their first argument as they return."""
_FREE = frozenset({"detach", "empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view", "lift_fresh"})

Shape = tuple[int, int, int, int]
"""m, n, k and how many of them one call computes."""


@dataclass(slots=True)
class _UnitCost:
    """What one unit did in one run."""

    products: list[Shape] = field(default_factory=list)
    backward_products: list[Shape] = field(default_factory=list)
    attention_flops: int = 0
    moved: int = 0
    backward_moved: int = 0
    saved: int = 0
    output: int = 0


ComputeLoss = Callable[[nn.Module, Batch], Loss]


def trace_module(
    module: nn.Module,
    read_batch: Callable[[int], Batch],
    compute_loss: ComputeLoss,
    *,
    units: Sequence[str],
    blocks: Iterable[str] = (),
    precision: str = "float32",
) -> ModuleTrace:
    """``read_batch``: so many equal samples. ``compute_loss`` runs in the job's autocast. ``units``: names of modules,
    in order; what belongs to none of them is the last unit, without a name. ``blocks``: the repeated ones among them.
    """
    sizes, chosen = _own_params(module, units), set(blocks)
    try:
        dataless = copy_without_data(module, torch.device("cpu"))
        recorders = [_record(dataless, read_batch(number), compute_loss, units) for number in NUM_SAMPLES]
        found = [
            _unit(name, sizes[name], *(recorder.units[name] for recorder in recorders), is_block=name in chosen)
            for name in (*units, _REST)
        ]
    except NotCountable as signal:
        return untraced(module, str(signal), units=units, blocks=chosen, precision=precision)
    return ModuleTrace(tuple(found), tuple(recorders[0].unknown), precision)


def untraced(
    module: nn.Module, why: str, *, units: Sequence[str], blocks: Collection[str], precision: str
) -> ModuleTrace:
    """The parameters alone."""
    sizes = _own_params(module, units)
    found = (TracedUnit(name, sizes[name], is_block=name in blocks) for name in (*units, _REST))
    return ModuleTrace(tuple(found), (f"The model could not be traced: {why}.",), precision)


def _own_params(module: nn.Module, units: Sequence[str]) -> Counter[str]:
    sizes = Counter[str]()
    for name, parameter in module.named_parameters():
        owner = next((unit for unit in units if name.startswith(f"{unit}.")), _REST)
        sizes[owner] += parameter.numel()
    return sizes


def _record(dataless: DatalessModule, batch: Batch, compute_loss: ComputeLoss, units: Sequence[str]) -> _Recorder:
    device = torch.device("cpu")
    fake = dataless.without_data(batch)
    held = (*dataless.module.parameters(), *dataless.module.buffers(), *_tensors(fake))
    recorder = _Recorder(held)
    dataless.module.train()
    try:
        with ExitStack() as stack:
            stack.enter_context(dataless_settings(device, keeps_streams=True, fuses_attention=True))
            stack.enter_context(guarded(dataless.originals))
            stack.enter_context(dataless.mode)
            stack.enter_context(recorder)
            stack.enter_context(_watched(dataless.module, units, recorder))
            with torch.autograd.graph.saved_tensors_hooks(recorder.save, lambda tensor: tensor):
                total = compute_loss(dataless.module, fake).total
            recorder.is_backward = True
            total.backward()
    except NotCountable:
        raise
    except Exception as error:  # anything may fail without data
        raise NotCountable(reason(error)) from error
    finally:
        dataless.module.zero_grad(set_to_none=True)
    return recorder


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


@contextmanager
def _watched(module: nn.Module, units: Sequence[str], recorder: _Recorder) -> Iterator[None]:
    with ExitStack() as stack:
        for name in units:
            part = module.get_submodule(name)
            before = part.register_forward_pre_hook(lambda *_, name=name: recorder.enter(name))
            after = part.register_forward_hook(lambda _, __, output: recorder.leave(output))
            stack.callback(before.remove)
            stack.callback(after.remove)
        yield


class _Recorder(TorchDispatchMode):
    """Listens to one forward and backward; see [Note: whose operation]."""

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.units: dict[str, _UnitCost] = defaultdict(_UnitCost)
        self.unknown: dict[str, None] = {}
        self.is_backward = False
        self._running = [_REST]
        self._starts, self._names = [0], [_REST]
        self._seen = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in held}
        """Storages that are counted or not to be: kept, so that no other takes their key."""

    def enter(self, name: str) -> None:
        self._running.append(name)
        self._mark()

    def leave(self, output: Any) -> None:
        self.units[self._running.pop()].output += sum(tensor.nbytes for tensor in _tensors(output))
        self._mark()

    def _mark(self) -> None:
        self._starts.append(torch._C._autograd._get_sequence_nr())
        self._names.append(self._running[-1])

    def save(self, tensor: Tensor) -> Tensor:
        """Autograd keeps this tensor for backward."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen[storage._cdata] = storage
            self.units[self._running[-1]].saved += storage.nbytes()
        return tensor

    def _unit_at_work(self) -> str:
        if not self.is_backward:
            return self._running[-1]
        node = torch._C._current_autograd_node()
        if node is None or node.name().endswith("AccumulateGrad"):
            return _REST
        return self._names[bisect_right(self._starts, node._sequence_nr()) - 1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _COLLECTIVES:
            raise NotCountable("it calls a collective of its own")
        result = func(*args, **(kwargs or {}))
        name, unit = func._opname, self.units[self._unit_at_work()]
        if func.namespace in _SILENT:
            return result
        if func.namespace != "aten":
            self.unknown[f"The time of the operation {func.namespace}::{name} is not known."] = None
        elif products := _products(name, args, result):
            (unit.backward_products if self.is_backward else unit.products).extend(products)
        elif name.startswith("_scaled_dot_product"):
            if not self.is_backward:
                unit.attention_flops += _attention_flops(args)
        elif not func.is_view and name not in _FREE:
            moved = _moved_bytes(name, args, result)
            if self.is_backward:
                unit.backward_moved += moved
            else:
                unit.moved += moved
        return result


def _products(name: str, args: Any, result: Any) -> list[Shape]:
    if name in _MM or name in _ADDMM:
        a, b = args[1:3] if name in ("addmm", "_addmm_activation") else args[:2]
        return [(a.shape[0], b.shape[1], a.shape[1], 1)]
    if name in _BMM:
        a, b = args[_BMM[name] : _BMM[name] + 2]
        return [(a.shape[1], b.shape[2], a.shape[2], a.shape[0])]
    if name == "_grouped_mm":  # rows are shared out among the experts
        return [(args[0].shape[-2], args[1].shape[-1], args[0].shape[-1], 1)]
    if name in ("convolution", "_convolution"):
        return [_convolution(result.shape, args[0].shape, args[1].shape, is_transposed=args[6], groups=args[8])]
    if name == "convolution_backward":
        m, n, k, groups = _convolution(
            args[0].shape, args[1].shape, args[2].shape, is_transposed=args[7], groups=args[9]
        )
        by_operand = ((m, k, n, groups), (k, n, m, groups))  # of the input, of the weight
        return [shape for shape, is_wanted in zip(by_operand, args[10], strict=False) if is_wanted]
    return []


def _convolution(output: Any, given: Any, weight: Any, *, is_transposed: bool, groups: int) -> Shape:
    """The product of a convolution: a row for each position. A transposed one is the gradient of a plain one."""
    taps = prod(weight[2:])
    if is_transposed:
        return given[0] * prod(given[2:]), weight[1] * taps, weight[0] // groups, groups
    return output[0] * prod(output[2:]), weight[0] // groups, weight[1] * taps, groups


def _attention_flops(args: Any) -> int:
    queries, keys, values = args[:3]
    pairs = prod(queries.shape[:-1]) * keys.shape[-2]
    return int(2 * pairs * (queries.shape[-1] + values.shape[-1]))


def _moved_bytes(name: str, args: Any, result: Any) -> int:
    written = sum(tensor.nbytes for tensor in _tensors(result))
    if name in _ROWS_ALONE:
        return 2 * written
    return written + sum(tensor.nbytes for tensor in _tensors(args))


def _unit(name: str, num_params: int, two: _UnitCost, three: _UnitCost, *, is_block: bool) -> TracedUnit:
    def per_sample(kind: str) -> float:
        return float(getattr(three, kind) - getattr(two, kind))

    def per_micro_batch(*kinds: str) -> float:
        return max(0.0, float(sum(getattr(two, kind) - NUM_SAMPLES[0] * per_sample(kind) for kind in kinds)))

    return TracedUnit(
        name,
        num_params,
        _grown(two.products, three.products),
        _grown(two.backward_products, three.backward_products),
        attention_flops=per_sample("attention_flops"),
        moved_bytes=per_sample("moved"),
        backward_moved_bytes=per_sample("backward_moved"),
        fixed_moved_bytes=per_micro_batch("moved", "backward_moved"),
        saved_activation_bytes=per_sample("saved"),
        fixed_saved_bytes=per_micro_batch("saved"),
        output_bytes=per_sample("output"),
        is_block=is_block,
    )


def _grown(two: Sequence[Shape], three: Sequence[Shape]) -> tuple[Product, ...]:
    """For one sample, by comparing the products of two samples and of three."""
    if len(two) != len(three):
        raise NotCountable("the number of its matrix products depends on the number of samples")
    counts = Counter(_one_sample(small, large) for small, large in zip(two, three, strict=True))
    return tuple(
        Product(m, n, k, count * number, is_batched, grows)
        for (m, n, k, count, is_batched, grows), number in counts.items()
    )


def _one_sample(small: Shape, large: Shape) -> tuple[int, int, int, int, bool, str]:
    changed = [index for index in range(4) if small[index] != large[index]]
    m, n, k, count = small
    if not changed:
        return (m, n, k, count, False, "")
    if len(changed) > 1 or (large[changed[0]] - small[changed[0]]) * NUM_SAMPLES[0] != small[changed[0]]:
        raise NotCountable("the size of a matrix product is not proportional to the number of samples")
    dims = list(small)
    dims[changed[0]] //= NUM_SAMPLES[0]
    m, n, k, count = dims
    if changed[0] == 1:  # the transposed product
        m, n = n, m
    return (m, n, k, count, changed[0] == 3, {0: "m", 1: "m", 2: "k", 3: ""}[changed[0]])
