"""Records what this rank, its host and its device use: in intervals (``ResourceUse``), and memory by kind
(``MemoryRecorder``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from closeranks.core.events import Event, MemoryUsed
from closeranks.core.protocols import Reducer
from closeranks.core.world import World
from closeranks.elastic.vote import Verdict
from closeranks.run.components.component import Component, Components
from closeranks.run.components.model import Model
from closeranks.run.state.saved_state import OPTIMIZER
from closeranks.telemetry.device import device_uuid, peak_memory_bytes, total_bytes
from closeranks.telemetry.memory_kinds import StorageBytes, with_activations
from closeranks.telemetry.resources.sampler import ResourceSampler

if TYPE_CHECKING:
    from closeranks.run.step.step_results import StepResult


class ResourceUse(Component):
    def __init__(self, world: World, device: torch.device, interval_s: float) -> None:
        self._world, self._device, self._interval_s = world, device, interval_s
        self._sampler: ResourceSampler | None = None
        self._is_started = False

    def begin(self, index: int) -> None:
        if self._sampler is None:
            world = self._world
            self._sampler = ResourceSampler(
                self._interval_s,
                world.hosts[world.rank] if world.hosts else world.rank // max(1, world.local_size),
                reads_host=world.local_rank == 0,
                gpu_uuid=device_uuid(self._device),
            )

    def settled(self, entry: StepResult, emit: Callable[[Event], None]) -> None:
        if self._sampler is not None and not self._is_started:
            self._sampler.start(emit)
            self._is_started = True

    def ended(self, num_done: int, emit: Callable[[Event], None]) -> None:
        if self._sampler is not None:
            self._sampler.close()


class MemoryRecorder(Component):
    """Memory is measured once, in the second step after its vote: gradients are complete, activations freed, and the
    first step has allocated whatever it keeps. Cost: the state is listed once."""

    def __init__(self, components: Components, model: Model, reducer: Reducer) -> None:
        self._components, self._model, self._reducer, self._device = components, model, reducer, model.device
        self._first: int | None = None
        self._kinds: dict[str, int] = {}
        self._allocated_bytes = 0
        """By torch on the accelerator when the kinds were measured."""
        self._is_reported = False

    def begin(self, index: int) -> None:
        if self._first is None:
            self._first = index

    def after_vote(self, index: int, verdict: Verdict) -> None:
        if index - 1 != self._first:
            return
        if self._device.type == "cuda":
            self._allocated_bytes = torch.cuda.memory_allocated(self._device)
        self._kinds = self._measured()

    def settled(self, entry: StepResult, emit: Callable[[Event], None]) -> None:
        if self._kinds and not self._is_reported:
            self._is_reported = True
            emit(self._event(entry.done.step))

    def ended(self, num_done: int, emit: Callable[[Event], None]) -> None:
        if self._kinds:
            emit(self._event(num_done))

    def _measured(self) -> dict[str, int]:
        storages = StorageBytes(self._device)
        parameters = [held.parameter for held in self._model.applied.held]
        state = [one for tensors in self._components.phases["tensors"] for one in tensors()]
        return {
            "parameters": storages.add(parameters),
            "gradients": storages.add((*_gradients(parameters), *self._reducer.gradients())),
            "optimizer": storages.add(one.tensor for one in state if one.section == OPTIMIZER),
            "buffers": storages.add((*self._model.module.buffers(), *(one.tensor for one in state))),
        }

    def _event(self, step: int) -> MemoryUsed:
        for memory in self._components.phases["memory"]:
            for kind, num_bytes in memory().items():
                self._kinds[kind] = num_bytes
        peak_bytes = peak_memory_bytes(self._device)
        kinds = self._kinds
        if self._device.type == "cuda":
            kinds = with_activations(kinds, self._allocated_bytes, peak_bytes)
        return MemoryUsed(step, dict(kinds), peak_bytes, total_bytes(self._device))


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
