"""Suspends FSDP2's post-backward hooks while a backward is split into two halves, and does their work afterwards.

[Note: FSDP2 and halves] FSDP2 reduces a module's gradients and re-shards it when the backward reaches the module's
input. In a backward split into two halves that moment comes in the first half, before there are weight gradients, and
never in the second. So both halves run inside ``suspend_fsdp_hooks``: gradients accumulate in the unsharded parameters.
After the second half, ``finish_fsdp_backward`` does what FSDP2 does at the end of a backward, as the reducer has
configured it: reduce or keep gradients, re-shard or stay unsharded, finish the step or continue it.

Invariant: afterwards FSDP2 is in the state that a whole backward would have left it in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

_SETTINGS = ("reduce_grads", "all_reduce_grads", "reshard_after_backward")


@contextmanager
def suspend_fsdp_hooks(module: nn.Module) -> Iterator[None]:
    """Inside this context nothing is reduced, re-sharded or finished, whatever the reducer has configured."""
    owners = [(group, name) for state in _states(module) for group in _groups(state) for name in _SETTINGS]
    owners += [(state._state_ctx, "is_last_backward") for state in _states(module)]
    before = [getattr(owner, name) for owner, name in owners]
    for owner, name in owners:
        setattr(owner, name, False)
    try:
        yield
    finally:
        for (owner, name), value in zip(owners, before, strict=True):
            setattr(owner, name, value)


def finish_fsdp_backward(module: nn.Module) -> None:
    """Finish a backward as FSDP2 would. A collective of the sharding ranks if the reducer wants a reduction now."""
    for state in _states(module):
        if state._is_root:
            state._root_post_backward_final_callback()


def unshard(module: nn.Module) -> None:
    """Unshard the weights for the second half, before which no FSDP2 hook runs: a forward since the first half may have
    re-sharded them, and some nodes read a weight even where only its gradient is computed (layer norm)."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.unshard()


def _states(module: nn.Module) -> list[Any]:
    states = [part._get_fsdp_state() for part in module.modules() if isinstance(part, FSDPModule)]
    return list({id(state): state for state in states}.values())


def _groups(state: Any) -> list[Any]:
    """torch 2.11 has one parameter group per module, later versions several."""
    several = getattr(state, "_fsdp_param_groups", None)
    one = [] if several is not None else [state._fsdp_param_group]
    return [group for group in (several if several is not None else one) if group is not None]
