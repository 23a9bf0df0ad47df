"""Counts the FLOPs of a model whose spec does not know them, on the shapes of the run's first micro-batch.

Rank 0 of the first generation copies the model without data while it builds it, when it still has the whole, and counts
at the end of the first step, which is in no throughput. By then the user's code has filled its caches with real
tensors. Invariant: training neither waits for the count nor depends on it, whatever the user's code does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from closeranks.core import phases
from closeranks.core.events import Event, FlopsCounted
from closeranks.core.protocols import Batch, Loss, ModelSpec
from closeranks.core.registry import is_import_path
from closeranks.core.world import World
from closeranks.models.batches import num_samples
from closeranks.models.flop_count import DatalessModule, NotCountable, copy_without_data, count_flops
from closeranks.parallel.precision import Precision
from closeranks.parallel.recompute import recompute
from closeranks.run.components.component import Component
from closeranks.run.job.job import Job

if TYPE_CHECKING:
    from closeranks.data.loading.batch_reader import LoadedBatch
    from closeranks.run.step.step_results import StepResult


class ModelFlops(Component):
    def __init__(self, job: Job, spec: ModelSpec, device: torch.device) -> None:
        self._job, self._spec, self._device = job, spec, device
        self._precision = Precision(job.train.precision)
        self._copy: DatalessModule | None = None
        self._recomputing: DatalessModule | None = None
        """A copy whose blocks recompute their activations; None if those of the run do not."""
        self._batch: Batch | None = None
        self._counted: FlopsCounted | None = None

    def copy(self, module: nn.Module) -> None:
        """Called with the whole model, before any transform."""
        train = self._job.train
        try:
            self._copy = copy_without_data(module, self._device)
            if train.recompute != "none" and self._spec.blocks:
                self._recomputing = copy_without_data(module, self._device)
                recompute(self._recomputing.module, self._spec.blocks, train.recompute, train.recompute_keep)
        except NotCountable as signal:
            self._copy, self._counted = None, FlopsCounted(why=str(signal))

    def loaded(self, index: int, batches: Sequence[LoadedBatch]) -> None:
        whole = [one.batch for one in batches if not one.micro_batch.is_padding]
        if self._copy is not None and self._batch is None and whole:
            try:
                self._batch = self._copy.without_data(whole[0])
            except Exception as error:  # a user's batch may hold anything
                self._copy, self._counted = None, FlopsCounted(why=f"the batch cannot be copied: {error}")

    def end(self, index: int) -> None:
        if self._copy is not None and self._batch is not None:
            with phases.phase(phases.OTHER):
                self._counted = self._count(self._copy, self._batch)
            self._copy = self._recomputing = self._batch = None

    def settled(self, entry: StepResult, emit: Callable[[Event], None]) -> None:
        counted, self._counted = self._counted, None
        if counted is not None:
            emit(counted)

    def _count(self, model: DatalessModule, batch: Batch) -> FlopsCounted:
        began = time.perf_counter()
        try:
            num_items = num_samples(batch) * self._spec.items_per_sample
            flops = self._flops(model, batch)
        except NotCountable as signal:
            return FlopsCounted(why=str(signal), seconds=time.perf_counter() - began)
        try:
            hardware = flops
            if self._recomputing is not None:
                hardware = self._flops(self._recomputing, batch)
        except NotCountable:
            hardware = 0
        return FlopsCounted(flops / num_items, hardware / num_items, seconds=time.perf_counter() - began)

    def _flops(self, model: DatalessModule, batch: Batch) -> int:
        # A thread that reads the user's data here draws from Python's and numpy's streams at the same time.
        reads_here = self._job.data.workers == 0 and is_import_path(self._job.data.name)
        return count_flops(model, batch, self._device, self._loss, keeps_streams=not reads_here)

    def _loss(self, module: nn.Module, batch: Batch) -> Loss:
        with self._precision.context(self._device):
            return self._spec.loss(module.train(), self._precision.cast(batch))


def make_model_flops(job: Job, world: World, spec: ModelSpec, device: torch.device) -> ModelFlops | None:
    """None where the FLOPs are known, counted already, or not to be counted."""
    is_due = world.is_lead and world.is_first_generation and not spec.flops_per_item
    return ModelFlops(job, spec, device) if is_due and job.telemetry.count_flops else None
