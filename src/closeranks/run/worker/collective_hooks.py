"""Records every collective of this process, whoever issues it, for the agent to read while the process hangs.

[Note: where collectives are seen] All of torch's Python code ends in a few methods of ``ProcessGroup``: FSDP2,
pipelines, our reducers and a user's own ``torch.distributed`` calls. These methods are replaced, and with them
``Work.wait``. The functional collectives of DTensor and of our tensor axis go to C++ directly, so the functions that
call them are replaced as well. What torch compiles is not recorded. torch's own flight recorder would see the same
calls, but on Gloo it never learns that one has completed, and it can only be read by the process that hangs.

Invariants: arguments, results and errors pass through unchanged; recording costs about six microseconds a collective
(by timeit, without the collective itself), and never raises: a problem is logged, once.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed import ProcessGroup, Work

import closeranks
from closeranks.agent.detection.standstill.collective_record import DTYPES, OPS, CollectiveRecord, CollectiveState
from closeranks.core.tracebacks import display_path, is_package_file, is_user_file
from closeranks.parallel.mesh_groups import MeshGroups
from closeranks.parallel.process_group import RankGroup
from closeranks.parallel.tensor import activation_collectives
from closeranks.run.worker.agent_client import current_link

_log = logging.getLogger(__name__)
_NO_PEER = -1
_MAX_PENDING = 256
"""Works that nobody waits for are forgotten beyond this number."""
_NOTHING: Sequence[int] = ()


class _Method(NamedTuple):
    op: str
    tensor: int
    """Which argument has the tensor that must be alike on all ranks."""
    peer: int | None = None


_METHODS = {
    "allreduce": _Method("all_reduce", 0),
    "allreduce_coalesced": _Method("all_reduce", 0),
    "broadcast": _Method("broadcast", 0),
    "reduce": _Method("reduce", 0),
    "allgather": _Method("all_gather", 1),
    "allgather_coalesced": _Method("all_gather", 1),
    "_allgather_base": _Method("all_gather", 1),
    "all_gather_single": _Method("all_gather", 1),
    "allgather_into_tensor_coalesced": _Method("all_gather", 1),
    "all_gather_single_coalesced": _Method("all_gather", 1),
    "reduce_scatter": _Method("reduce_scatter", 0),
    "_reduce_scatter_base": _Method("reduce_scatter", 0),
    "reduce_scatter_single": _Method("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced": _Method("reduce_scatter", 0),
    "reduce_scatter_single_coalesced": _Method("reduce_scatter", 0),
    "alltoall": _Method("all_to_all", 1),
    "alltoall_base": _Method("all_to_all", 1),
    "all_to_all_single": _Method("all_to_all", 1),
    "gather": _Method("gather", 1),
    "scatter": _Method("scatter", 0),
    "barrier": _Method("barrier", -1),
    "send": _Method("send", 0, peer=1),
    "recv": _Method("recv", 0, peer=1),
}
"""Of ``ProcessGroup``; which of them there are depends on torch's version."""
_FUNCTIONS = {
    "all_reduce": "all_reduce",
    "broadcast": "broadcast",
    "all_gather_single": "all_gather",
    "all_gather_tensor": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
_RENAMED = {"all_gather_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}
"""Functions that call a newer one where there is one."""


class CollectiveHooks:
    """Installed until ``remove``."""

    def __init__(self, record: CollectiveRecord) -> None:
        self._record = record
        self._dtypes = {getattr(torch, name): index for index, name in enumerate(DTYPES) if hasattr(torch, name)}
        self._works: dict[int, int] = {}
        """Numbers of the collectives that nobody has waited for yet, by the id of their Work or result."""
        self._has_failed = False
        self._originals: list[tuple[object, str, object]] = []
        for name, method in _METHODS.items():
            if name in vars(ProcessGroup):
                self._replace(ProcessGroup, name, self._method(getattr(ProcessGroup, name), method))
        self._replace(Work, "wait", self._wait(Work.wait))
        for name, op in _FUNCTIONS.items():
            if hasattr(funcol, name) and not hasattr(funcol, _RENAMED.get(name, "")):
                self._replace(funcol, name, self._function(getattr(funcol, name), op))
        self._replace(funcol, "wait_tensor", self._wait_tensor(funcol.wait_tensor))
        for name, op in activation_collectives.BLOCKING.items():
            original = getattr(activation_collectives, name)
            self._replace(activation_collectives, name, self._blocking(original, op))

    def remove(self) -> None:
        while self._originals:
            owner, name, original = self._originals.pop()
            setattr(owner, name, original)

    def label(self, group: RankGroup, axis: str) -> None:
        """Name the axis of a group; a group of one rank has none."""
        if group.size > 1:
            process_group = group.process_group or dist.group.WORLD
            assert process_group is not None
            self._record.label_group(process_group.group_name, axis, dist.get_process_group_ranks(process_group))

    # --- what replaces torch's functions

    def _replace(self, owner: object, name: str, replacement: object) -> None:
        self._originals.append((owner, name, vars(owner)[name]))
        setattr(owner, name, replacement)

    def _method(self, original: Callable[..., Any], method: _Method) -> Callable[..., Any]:
        op, place_of_tensor, place_of_peer = OPS.index(method.op), method.tensor, method.peer
        issue, works = self._issue, self._works

        def call(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            peer = args[place_of_peer] if place_of_peer is not None and len(args) > place_of_peer else _NO_PEER
            tensor = args[place_of_tensor] if 0 <= place_of_tensor < len(args) else None
            number = issue(op, self.group_name, tensor, peer)
            work = original(self, *args, **kwargs)
            if work is not None:
                works[id(work)] = number
            return work

        return call

    def _wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        take, mark = self._works.pop, self._record.mark
        waiting, done = int(CollectiveState.WAITING), int(CollectiveState.DONE)

        def wait(self: Work, *args: Any, **kwargs: Any) -> Any:
            number = take(id(self), None)
            if number is None:
                return original(self, *args, **kwargs)
            mark(number, waiting)
            result = original(self, *args, **kwargs)
            mark(number, done)
            return result

        return wait

    def _function(self, original: Callable[..., Any], op_name: str) -> Callable[..., Any]:
        op, issue, works = OPS.index(op_name), self._issue, self._works

        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(tensor, *args, **kwargs)
            group = kwargs["group"] if "group" in kwargs else args[-1]
            number = issue(op, group, tensor, _NO_PEER)
            result = original(tensor, *args, **kwargs)
            works[id(getattr(result, "elem", result))] = number
            return result

        return call

    def _blocking(self, original: Callable[..., Any], op_name: str) -> Callable[..., Any]:
        """A function of ours that issues a collective and waits for it; its last argument is the group's name."""
        op, issue, mark = OPS.index(op_name), self._issue, self._record.mark

        def call(tensor: Tensor, *args: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(tensor, *args)
            number = issue(op, args[-1], tensor, _NO_PEER)
            mark(number, CollectiveState.WAITING)
            result = original(tensor, *args)
            mark(number, CollectiveState.DONE)
            return result

        return call

    def _wait_tensor(self, original: Callable[..., Any]) -> Callable[..., Any]:
        take, mark = self._works.pop, self._record.mark

        def wait_tensor(tensor: Tensor) -> Any:
            if torch.compiler.is_compiling():
                return original(tensor)
            number = take(id(tensor), None)
            if number is None:
                return original(tensor)
            mark(number, CollectiveState.WAITING)
            result = original(tensor)
            mark(number, CollectiveState.DONE)
            return result

        return wait_tensor

    # --- recording

    def _issue(self, op: int, group: object, tensor: object, peer: int) -> int:
        """Returns the number of the collective; 0 if it could not be recorded."""
        try:
            name = group if isinstance(group, str) else _group_name(group)
            return self._record_issued(op, name, tensor, peer)
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                _log.warning("a collective (%s) is missing in the record", OPS[op], exc_info=True)
            return 0

    def _record_issued(self, op: int, group: str, tensor: object, peer: int) -> int:
        record, works = self._record, self._works
        if not record.has_group(group):
            self._label_unknown(group)
        if len(works) > _MAX_PENDING:
            works.clear()
        shape, dtype = _NOTHING, None
        while isinstance(tensor, (list, tuple)):
            if len(tensor) > 1 and isinstance(tensor[0], Tensor):  # several tensors: how much they hold together
                shape, dtype, tensor = (sum(map(torch.numel, tensor)),), tensor[0].dtype, None
            else:
                tensor = tensor[0] if tensor else None
        if isinstance(tensor, Tensor):
            shape, dtype = tensor.shape, tensor.dtype
        return record.issue(op, group, shape, self._dtypes.get(dtype, 0), self._place(), peer)

    def _label_unknown(self, group: str) -> None:
        """A group of the user's own, or a new one."""
        found = next((one for one in _all_groups() if one.group_name == group), None)
        is_world = found is not None and found is dist.group.WORLD
        ranks = dist.get_process_group_ranks(found) if found is not None else ()
        self._record.label_group(group, "world" if is_world else "", ranks)

    def _place(self) -> int:
        """The innermost line of the user's that leads here, else the innermost of ours."""
        frame: FrameType | None = sys._getframe(4)
        ours: FrameType | None = None
        while frame is not None:
            owner = _owner(frame.f_code.co_filename)
            if owner == _USER:
                break
            if owner == _OURS and ours is None:
                ours = frame
            frame = frame.f_back
        frame = frame or ours
        if frame is None:
            return 0
        code = frame.f_code
        key = (code.co_filename, code.co_firstlineno, frame.f_lasti)
        known = self._record.known_place(key)
        if known is not None:
            return known
        return self._record.add_place(key, _shown(code.co_filename), frame.f_lineno, code.co_name)


_FOREIGN, _OURS, _USER = range(3)


@cache
def _owner(filename: str) -> int:
    if filename == __file__:
        return _FOREIGN
    return _USER if is_user_file(filename) else _OURS if is_package_file(filename) else _FOREIGN


def _shown(filename: str) -> str:
    """The path of a source file as a reader knows it: of ours, within the package."""
    if not is_package_file(filename):
        return display_path(filename)
    return str(Path("closeranks", Path(filename).relative_to(Path(closeranks.__file__).parent)))


def _group_name(group: object) -> str:
    name = getattr(group, "group_name", None)
    return str(name if name is not None else funcol._resolve_group_name(group, ""))  # type: ignore[arg-type]


def _all_groups() -> list[ProcessGroup]:
    return [group for group in dist.distributed_c10d._world.pg_map if isinstance(group, ProcessGroup)]


class _Installed:
    hooks: CollectiveHooks | None = None


def record_collectives() -> None:
    """Record all collectives of this process from now on, if an agent reads the record."""
    link = current_link()
    if link is not None and link.collectives is not None and _Installed.hooks is None:
        _Installed.hooks = CollectiveHooks(link.collectives)


def label_groups(world: RankGroup, groups: MeshGroups | None = None) -> None:
    """Name the axes of a session's groups."""
    if (hooks := _Installed.hooks) is None:
        return
    if groups is None:
        hooks.label(world, "world")
        return
    for axis in ("replica", "shard", "tensor", "pipeline", "data"):  # the last name of a group is the one it has
        hooks.label(getattr(groups, axis), axis)
