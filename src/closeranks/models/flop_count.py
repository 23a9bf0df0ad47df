"""Counts the FLOPs of any module: forward and backward of one batch, executed on tensors without data.

The module is copied without its data, and torch's own counter (``torch.utils.flop_counter``) watches the copy run on
fake tensors: every operation is seen with its shapes, none is computed. Products and convolutions count, at two FLOPs
for a multiplication with its addition. Attention counts every query with every key, however it is computed. Invariants:
the module, its buffers, the batch and the random streams stay as they are; what cannot be counted in full raises
``NotCountable``, and nothing is guessed.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from closeranks.core.protocols import Batch, Loss
from closeranks.core.tracebacks import display_path, one_line_error, user_frame

_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
_PLAIN = frozenset({"aten", "prim", "prims", "profiler"})
"""Namespaces whose operations torch counts, or that take few FLOPs."""
_OUTSIDE = "the loss trains parameters that are not of the module it is given"
_UNCOUNTED = ("_cudnn_rnn", "mkldnn_rnn_layer", "miopen_rnn")
"""Operations of torch with products inside that its counter does not see."""


class NotCountable(Exception):
    """Says why the FLOPs of a module could not be counted: a signal to the caller, never an error of the run."""


@dataclass(frozen=True, slots=True)
class DatalessModule:
    """A copy of a module whose tensors have shapes and no data."""

    module: nn.Module
    mode: FakeTensorMode
    originals: frozenset[int]
    """The ids of the modules that were copied. They are not to be called: hooks of FSDP and of ours are theirs."""

    def without_data(self, batch: Batch) -> Batch:
        """A batch of the same shapes for it; nothing of the original is kept."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fake: Batch = tree_map_only(Tensor, self.mode.from_tensor, dict(batch))
        return fake


def copy_without_data(module: nn.Module, device: torch.device) -> DatalessModule:
    """``device``: where tensors count as being that are on the meta device."""
    mode = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)
    memo: dict[int, Any] = {}
    try:
        with mode:
            for tensor in _tensors(module):
                memo.setdefault(id(tensor), _empty_like(tensor, device))
        return DatalessModule(copy.deepcopy(module, memo), mode, frozenset(map(id, module.modules())))
    except Exception as error:  # the user's module may hold anything
        raise NotCountable(f"the module cannot be copied: {one_line_error(error)}") from error


def count_flops(
    dataless: DatalessModule,
    batch: Batch,
    device: torch.device,
    compute_loss: Callable[[nn.Module, Batch], Loss],
    *,
    keeps_streams: bool = True,
) -> int:
    """FLOPs of forward and backward of a batch that ``without_data`` made. Cost: a fraction of a millisecond for each
    operation of the model. ``keeps_streams``: restore the random streams of Python and numpy, too."""
    counter = FlopCounterMode(display=False)
    try:
        with (
            dataless_settings(device, keeps_streams=keeps_streams),
            guarded(dataless.originals),
            dataless.mode,
            _Refusing(),
            counter,
        ):
            total = compute_loss(dataless.module, batch).total
            _check_leaves(total)
            total.backward()
    except NotCountable:
        raise
    except Exception as error:  # anything may fail without data; the step itself shows real errors
        raise NotCountable(reason(error)) from error
    finally:
        dataless.module.zero_grad(set_to_none=True)
    if not (flops := counter.get_total_flops()):
        raise NotCountable("it has no products or convolutions")
    return int(flops)


class _Refusing(TorchDispatchMode):
    """Refuses what the counter does not see, and what must not run in one process alone, as a collective."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func._overloadpacket
        if packet not in flop_registry and (func.namespace not in _PLAIN or func._opname in _UNCOUNTED):
            raise NotCountable(f"torch has no formula for the operation {func.namespace}::{func._opname}")
        return func(*args, **(kwargs or {}))


@contextmanager
def guarded(originals: frozenset[int]) -> Iterator[None]:
    """Refuses a call of the module that was copied."""

    def refuse(module: nn.Module, _: Any) -> None:
        if id(module) in originals:
            raise NotCountable(_OUTSIDE)

    handle = register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


def _check_leaves(total: Tensor) -> None:
    """Backward must not reach a tensor with data: it would get a gradient without."""
    nodes, seen = [total.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None) if node.name().endswith("AccumulateGrad") else None
        if leaf is not None and not isinstance(leaf, FakeTensor):
            raise NotCountable(_OUTSIDE)
        nodes += [one for one, _ in node.next_functions]


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers, and the tensors among plain attributes."""
    for part in module.modules():
        attributes = [value for name, value in vars(part).items() if name != "_modules"]
        yield from (leaf for leaf in tree_leaves(attributes) if isinstance(leaf, Tensor))


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    where = device if tensor.is_meta else tensor.device
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=where)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


@contextmanager
def dataless_settings(device: torch.device, *, keeps_streams: bool, fuses_attention: bool = False) -> Iterator[None]:
    """Every product is an operation of its own meanwhile: fused attention and RNNs are not all counted."""
    with ExitStack() as stack:
        if keeps_streams:
            stack.callback(random.setstate, random.getstate())
            stack.callback(np.random.set_state, np.random.get_state())
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if not fuses_attention:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield


def reason(error: BaseException) -> str:
    """Why running without data failed, for people."""
    while error.__cause__ is not None:
        error = error.__cause__
    frame = user_frame(error)
    where = f" ({display_path(frame.filename)}:{frame.lineno})" if frame else ""
    if isinstance(error, _NEEDS_VALUES):
        return f"its code depends on the values of a tensor{where}"
    if isinstance(error, UnsupportedOperatorException):
        return f"torch cannot run {error.func} without data{where}"
    return f"{one_line_error(error)}{where}"
