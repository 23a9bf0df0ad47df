"""A tool of tests: which collectives does a rank call, over whom, and how large are they?"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Kind:
    """An operation over a set of ranks."""

    operation: str
    ranks: tuple[int, ...]


_OPERATIONS = {
    "c10d.allreduce_": "all-reduce",
    "c10d.allreduce_coalesced_": "all-reduce",
    "c10d._allgather_base_": "all-gather",
    "c10d._reduce_scatter_base_": "reduce-scatter",
    "c10d.send": "send",
    "c10d.recv_": "receive",
    "_c10d_functional.all_reduce": "all-reduce",
    "_c10d_functional.all_reduce_": "all-reduce",
    "_c10d_functional.all_gather_into_tensor": "all-gather",
    "_c10d_functional.reduce_scatter_tensor": "reduce-scatter",
}


class Traffic(TorchDispatchMode):
    """Counts calls and payload bytes (of the whole tensor a collective is about) by operation and ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Kind] = Counter()
        self.payload: Counter[Kind] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).rpartition(".")[0]
        if name.startswith(("c10d.", "_c10d_functional.")) and "wait" not in name and "monitored" not in name:
            self._count(name, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        operation = _OPERATIONS[name]  # one that is not known here must not pass unseen
        ranks = _ranks_of(args)
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        if name.startswith("_c10d_functional"):
            whole = sum(sizes) * (len(ranks) if operation == "all-gather" else 1)
        elif operation in ("all-gather", "reduce-scatter"):
            whole = max(sizes)
        else:
            whole = sum(sizes)
        kind = Kind(operation, ranks)
        self.calls[kind] += 1
        self.payload[kind] += whole


def _ranks_of(args: Any) -> tuple[int, ...]:
    for argument in args:
        if isinstance(argument, str):
            try:
                return tuple(dist.get_process_group_ranks(_resolve_process_group(argument)))
            except (KeyError, RuntimeError, ValueError):
                continue  # the name of a reduction
        if type(argument).__name__ == "ScriptObject" and "ProcessGroup" in str(argument._type()):
            return tuple(dist.get_process_group_ranks(ProcessGroup.unbox(argument)))
    raise AssertionError("a collective without a group")
