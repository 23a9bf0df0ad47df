"""Activation recompute (checkpointing): which results of a block are kept for backward, and which are recomputed.

``full`` keeps a block's inputs alone, ``selective`` also the results of operations that cost most to repeat, by family.
Invariants: values, gradients and random masks are those of a run that keeps everything; names of modules and parameters
stay; a second computation depends on nothing but the block's inputs, its weights and the generators' state as it was in
the first, so that micro-batches may interleave in any order.

[Note: what is not recomputed] Running statistics of batch norms are written by the first computation only: the second
one writes to copies. A block that changes any other buffer of its own is refused, because its second computation could
differ from its first. The generators' states are kept for every block (about 10 microseconds and 5 KB): a user's module
does not say whether it draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from closeranks.core.errors import ModelError

FAMILIES: Mapping[str, frozenset[str]] = {
    # Products with weights. Not bmm: where attention is not fused its results are the scores, quadratic in length.
    "matmul": frozenset(
        f"aten::{name}" for name in ("mm", "addmm", "linear", "convolution", "_scaled_mm", "_grouped_mm")
    ),
    "attention": frozenset(
        {
            "aten::_scaled_dot_product_flash_attention",
            "aten::_scaled_dot_product_flash_attention_for_cpu",
            "aten::_scaled_dot_product_efficient_attention",
            "aten::_scaled_dot_product_cudnn_attention",
            "aten::_scaled_dot_product_fused_attention_overrideable",
            "flex_attention",
        }
    ),
    # Those that return their result. One that writes into a given tensor is repeated: what it wrote cannot be put back.
    "collective": frozenset(
        f"_c10d_functional::{name}"
        for name in (
            "all_reduce",
            "all_gather_into_tensor",
            "reduce_scatter_tensor",
            "all_to_all_single",
            "broadcast",
        )
    ),
}
KEEP = ("attention", "matmul", "collective")

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def recompute(module: nn.Module, units: Iterable[str], mode: str, keep: tuple[str, ...] = KEEP) -> None:
    """Make the named blocks recompute in backward what they do not keep.

    ``mode`` is none, selective or full; ``keep`` names the families that ``selective`` keeps.
    """
    if mode == "none":
        return
    kept = frozenset[str]().union(*(FAMILIES[family] for family in keep))
    for name in units:
        _wrap(name, module.get_submodule(name), kept if mode == "selective" else None)


def recompute_compiled(module: nn.Module, units: Iterable[str]) -> None:
    """``full`` for blocks that are compiled already: wraps the compiled call, of which only the inputs are kept.

    A compiler that sees the checkpoint inside its graph still keeps the inputs of attention and every half-precision
    copy of a weight (measured: more than ``selective`` keeps).
    """
    for name in units:
        block = module.get_submodule(name)
        block._compiled_call_impl = _repeated(name, block, block._compiled_call_impl)


def _repeated(name: str, block: nn.Module, call: Any) -> Any:
    norms = [part for part in block.modules() if isinstance(part, _NormBase) and part.track_running_stats]

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        with _unchanged(name, block, norms):
            return checkpoint(call, *args, use_reentrant=False, context_fn=partial(_contexts, None, norms), **kwargs)

    return recomputed


def _wrap(name: str, block: nn.Module, kept: frozenset[str] | None) -> None:
    forward = block.forward
    select: Contexts | None = None
    if kept is not None:
        select = partial(create_selective_checkpoint_contexts, partial(_policy, kept))
        _compute_out_of_place(block)
    norms = [part for part in block.modules() if isinstance(part, _NormBase) and part.track_running_stats]

    @wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # the compiler repeats results, never side effects
            options: dict[str, Any] = {} if select is None else {"context_fn": select}
            return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)
        with _unchanged(name, block, norms):
            contexts = partial(_contexts, select, norms)
            return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    block.forward = recomputed


def _policy(kept: frozenset[str], context: SelectiveCheckpointContext, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    schema = getattr(op, "_schema", None)
    name = schema.name if schema is not None else op.name()
    return CheckpointPolicy.MUST_SAVE if name in kept else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts(
    select: Contexts | None, norms: list[_NormBase]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    first, second = select() if select is not None else (nullcontext(), nullcontext())
    return first, _second_time(second, norms) if norms else second


@contextmanager
def _second_time(second: AbstractContextManager[Any], norms: list[_NormBase]) -> Iterator[None]:
    """Replace the running statistics by copies, which take what the second computation writes."""
    aside = [(norm, dict(norm._buffers)) for norm in norms]
    with ExitStack() as stack:
        for norm, buffers in aside:
            copies = {name: None if tensor is None else tensor.clone() for name, tensor in buffers.items()}
            stack.callback(norm._buffers.update, buffers)
            norm._buffers.update(copies)
        stack.enter_context(second)
        yield


@contextmanager
def _unchanged(name: str, block: nn.Module, norms: list[_NormBase]) -> Iterator[None]:
    """Refuse a block that changes a buffer other than batch statistics."""
    statistics = {id(buffer) for norm in norms for buffer in norm.buffers()}
    others = [(key, buffer) for key, buffer in block.named_buffers() if id(buffer) not in statistics]
    before = [_version(buffer) for _, buffer in others]
    yield
    for (key, buffer), version in zip(others, before, strict=True):
        if _version(buffer) != version:
            what = f"the block '{name}' changes its buffer '{key}' in forward, so it cannot be computed a second time"
            raise ModelError(what, 'Set train.recompute = "none".')


def _version(tensor: Tensor) -> int:
    return tensor._version


def _compute_out_of_place(block: nn.Module) -> None:
    """An activation with ``inplace=True`` would overwrite a result that is kept; the values are the same without."""
    for part in block.modules():
        if getattr(part, "inplace", False) is True:
            part.inplace = False  # type: ignore[assignment]
