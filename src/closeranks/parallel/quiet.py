"""What must FSDP2 not do during half of a backward, and who does it afterwards?

[Note: FSDP2 and halves] FSDP2 reduces a module's gradients and re-shards it when the backward reaches the module's
input. In a backward taken in two halves that moment comes in the first half, before there are gradients, and never in
the second. So both halves run ``quietly``: gradients gather in the unsharded parameters. After the second, ``settle``
does what FSDP2 does at the end of a backward, by what the reducer has set: reduce or keep, re-shard or stay, finish the
step or go on.

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
def quietly(module: nn.Module) -> Iterator[None]:
    """Whatever the reducer has set: nothing is reduced, re-sharded or finished in here."""
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


def settle(module: nn.Module) -> None:
    """The end of a backward. A collective of the sharding ranks where the reducer wants a reduction now."""
    for state in _states(module):
        if state._is_root:
            state._root_post_backward_final_callback()


def gather(module: nn.Module) -> None:
    """Have the weights at hand for the second half, which FSDP2's hooks do not see coming: a forward since the first
    may have re-sharded them, and some nodes read a weight even where its gradient alone is asked for (layer norm)."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.unshard()


def _states(module: nn.Module) -> list[Any]:
    states = [part._get_fsdp_state() for part in module.modules() if isinstance(part, FSDPModule)]
    return list({id(state): state for state in states}.values())


def _groups(state: Any) -> list[Any]:
    """torch 2.11 knows one group of parameters for a module, later ones several."""
    several = getattr(state, "_fsdp_param_groups", None)
    one = [] if several is not None else [state._fsdp_param_group]
    return [group for group in (several if several is not None else one) if group is not None]
