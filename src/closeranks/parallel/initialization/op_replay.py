"""Computes a single tensor of a recorded factory without computing the others.

A program is the trace of what a factory did to tensors: operations on views of numbered storages, in order. For one
view, ``OpReplay`` runs only the operations that its values depend on. A random operation starts from the generator
state that it would have in a run of the whole factory: to find those states, every draw is made once, in order, and
discarded. Invariant: ``OpReplay.value`` gives the bits that the factory itself would give after ``torch.manual_seed``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

Storages = dict[int, torch.UntypedStorage]


@dataclass(frozen=True, slots=True)
class StorageView:
    """A strided tensor in one of the program's storages."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class RecordedOp:
    """One operation that created or changed a storage. Pure views are not recorded: arguments carry their offsets."""

    op: Any
    args: tuple[Any, ...]
    """The original arguments, with views in place of tensors."""
    kwargs: dict[str, Any]
    reads: frozenset[int]
    writes: frozenset[int]
    outputs: tuple[StorageView | None, ...]
    overwrites: int | None = None
    """A storage that is overwritten completely."""
    draw: int | None = None
    """Index among the program's draws."""


@dataclass(frozen=True, slots=True)
class RngDraw:
    """A use of the random generator: its position, and the draw (-1: the seed) or the state from which it continues."""

    position: int
    start: int | Tensor


@dataclass(slots=True)
class OpTrace:
    """Everything that a factory did to tensors."""

    seed: int
    instructions: list[RecordedOp] = field(default_factory=list)
    num_bytes: dict[int, int] = field(default_factory=dict)
    constants: dict[int, Tensor] = field(default_factory=dict)
    """Data that came from outside of torch, byte by byte."""
    draws: list[RngDraw] = field(default_factory=list)
    writers: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """By storage, the positions of the instructions that write to it, in order."""

    def add(self, instruction: RecordedOp) -> None:
        for storage in instruction.writes:
            self.writers[storage].append(len(self.instructions))
        self.instructions.append(instruction)

    def dependencies(self, storages: Iterable[int], before: int) -> list[int]:
        """Positions of all instructions before ``before`` that these storages' values depend on, in order."""
        found: set[int] = set()
        seen: set[tuple[int, int]] = set()
        pending = [(storage, before) for storage in storages]
        while pending:
            storage, end = wanted = pending.pop()
            if wanted in seen:
                continue
            seen.add(wanted)
            writers = self.writers.get(storage, [])
            for position in reversed(writers[: bisect_left(writers, end)]):
                step = self.instructions[position]
                if position not in found:
                    found.add(position)
                    pending += [(read, position) for read in step.reads if read != storage]
                if step.overwrites == storage:
                    break
        return sorted(found)


class OpReplay:
    """Computes values of a program, one at a time. Between calls it holds only generator states (5 KB per draw)."""

    def __init__(self, trace: OpTrace) -> None:
        self._trace = trace
        self._states: list[Tensor] = []
        """States of the default generator: after seeding, then after each draw."""

    def value(self, view: StorageView, before: int | None = None) -> Tensor:
        """The value of ``view``, on the CPU, at the end or before an instruction.

        Peak memory: the value, what it is computed from, and the largest draw of the program before it.
        """
        end = len(self._trace.instructions) if before is None else before
        positions = self._trace.dependencies([view.storage], end)
        with _generator_kept(), torch.no_grad():
            self._compute_states(positions)
            return self._tensor(view, self._run(positions, view.storage))

    def _compute_states(self, positions: list[int]) -> None:
        """Find the generator states that the draws among these instructions start from."""
        starts = (self._trace.draws[d].start for p in positions if (d := self._trace.instructions[p].draw) is not None)
        last = max((start for start in starts if isinstance(start, int)), default=-1)
        if not self._states:
            torch.manual_seed(self._trace.seed)
            self._states.append(torch.get_rng_state())
        for number in range(len(self._states) - 1, last + 1):
            position = self._trace.draws[number].position
            step = self._trace.instructions[position]
            storages = self._run(self._trace.dependencies(step.reads, position), *step.reads)
            self._step(step, storages)
            self._states.append(torch.get_rng_state())

    def _run(self, positions: list[int], *kept: int) -> Storages:
        """Run instructions in order; a storage is freed after the last of them that uses it."""
        steps = [self._trace.instructions[position] for position in positions]
        last = {storage: number for number, step in enumerate(steps) for storage in step.reads | step.writes}
        storages: Storages = {}
        for number, step in enumerate(steps):
            self._step(step, storages)
            for storage in step.reads | step.writes:
                if last[storage] == number and storage not in kept:
                    storages.pop(storage, None)
        return storages

    def _step(self, step: RecordedOp, storages: Storages) -> None:
        if step.draw is not None:
            start = self._trace.draws[step.draw].start
            torch.set_rng_state(start if isinstance(start, Tensor) else self._states[start + 1])
        args, kwargs = tree_map_only(StorageView, lambda view: self._tensor(view, storages), (step.args, step.kwargs))
        made = tree_leaves(step.op(*args, **kwargs))
        for view, tensor in zip(step.outputs, made, strict=True):
            if view is not None and view.storage not in storages:
                storages[view.storage] = self._stored(tensor, view)

    def _tensor(self, view: StorageView, storages: Storages) -> Tensor:
        if view.storage not in storages:
            storages[view.storage] = self._fresh(view.storage)
        return torch.empty(0, dtype=view.dtype).set_(storages[view.storage], view.offset, view.size, view.stride)

    def _fresh(self, storage: int) -> torch.UntypedStorage:
        if storage in self._trace.constants:
            return self._trace.constants[storage].clone().untyped_storage()
        return torch.UntypedStorage(self._trace.num_bytes[storage])

    def _stored(self, tensor: Tensor, view: StorageView) -> torch.UntypedStorage:
        """An output's storage, with the recorded strides: kernels may lay out the same values differently."""
        if tuple(tensor.shape) != view.size or tensor.dtype != view.dtype:
            raise RuntimeError(f"recorded {view.dtype} {view.size}, made {tensor.dtype} {tuple(tensor.shape)}")
        if (tensor.stride(), tensor.storage_offset()) == (view.stride, view.offset):
            return tensor.untyped_storage()
        storages: Storages = {}
        self._tensor(view, storages).copy_(tensor)
        return storages[view.storage]


@contextmanager
def _generator_kept() -> Iterator[None]:
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
