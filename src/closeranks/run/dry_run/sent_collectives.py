"""Counts the collectives and messages of one rank, by the axis of the layout that they run on.

Listens where torch hands operations to a backend, so that nothing a rank sends goes unseen. Invariant: an operation
that is not known here raises, instead of passing uncounted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from closeranks.facts.communication.comm_volume import Operation
from closeranks.facts.layout import Layout
from closeranks.parallel.mesh_groups import MeshGroups

_OPERATIONS: Mapping[str, Operation] = {
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "send": "send",
}
_resolve: Callable[[str], dist.ProcessGroup] = vars(distributed_c10d)["_resolve_process_group"]
_SILENT = frozenset({"recv_", "wait_tensor", "barrier"})


class CollectiveKind(NamedTuple):
    axis: str
    operation: Operation
    num_ranks: int


class SentCollectives(TorchDispatchMode):
    """``axes``: the axis of each group, by the group's name."""

    def __init__(self, axes: Mapping[str, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[CollectiveKind] = Counter()
        self.payload_bytes: Counter[CollectiveKind] = Counter()
        """Of the whole tensors that the calls are about, as in ``facts.communication.comm_volume``."""
        self._axes = axes

    def clear(self) -> None:
        self.calls.clear()
        self.payload_bytes.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and func._opname not in _SILENT:
            self._count(func.namespace, func._opname, args)
        return func(*args, **(kwargs or {}))

    def _count(self, namespace: str, name: str, args: Any) -> None:
        operation, group = _OPERATIONS[name], _group_of(args)
        if group.size() == 1:
            return
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        sizes = [tensor.nbytes for tensor in tensors]
        if namespace == "c10d" and operation in ("all-gather", "reduce-scatter"):
            payload = max(sizes)  # its input and its output are given
        else:
            payload = sum(sizes) * (group.size() if operation == "all-gather" else 1)
        kind = CollectiveKind(self._axes.get(_name(group), "pipeline"), operation, group.size())
        self.calls[kind] += 1
        self.payload_bytes[kind] += payload


def axes_of_groups(groups: MeshGroups, layout: Layout) -> dict[str, str]:
    """The axis of each of this rank's groups, in the words of ``comm_volume``, by the group's name. Groups made
    later join the ends of a pipeline."""
    whole = groups.world.process_group or dist.group.WORLD
    names = {_name(whole): "data" if layout.num_ranks == layout.data else "world"}
    replicas = "replica" if layout.zero else "data"
    for axis, group in (
        ("data", groups.data),
        (replicas, groups.replica),
        ("shard", groups.shard),
        ("tensor", groups.tensor),
        ("pipeline", groups.pipeline),
    ):
        if group.process_group is not None:
            names[_name(group.process_group)] = axis
    return names


def _name(group: dist.ProcessGroup | None) -> str:
    assert group is not None, "the world has a group"
    return str(group.group_name)


def _group_of(args: Any) -> dist.ProcessGroup:
    for argument in args:
        if isinstance(argument, str):
            try:
                return _resolve(argument)
            except (KeyError, RuntimeError, ValueError):
                continue  # the name of a reduction
        if type(argument).__name__ == "ScriptObject" and "ProcessGroup" in str(argument._type()):
            return ProcessGroup.unbox(argument)
    raise AssertionError("a collective without a group")
