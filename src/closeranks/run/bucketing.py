"""Chooses the bucket size for this run's gradients.

It is the job's setting, else the size that an earlier generation used, else what is measured now. Invariant: all ranks
take the same branch and get the same size, as measuring is a collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from closeranks.core.protocols import LocalParameter, ModelSpec
from closeranks.facts.layout import Layout
from closeranks.parallel.mesh_groups import MeshGroups
from closeranks.run.job.job import Job, micro_batch_size
from closeranks.run.worker import generation_cache as heirloom
from closeranks.sync.reducers.bucket_tuning import (
    BackwardWork,
    BucketTuning,
    backward_s,
    gradient_bytes,
    tune_bucket_size,
)


def choose_bucket_size(
    job: Job,
    layout: Layout,
    groups: MeshGroups,
    spec: ModelSpec,
    held: Sequence[LocalParameter],
    measured_flops: float,
    device: torch.device,
) -> BucketTuning:
    if groups.data.size == 1 or layout.zero == 3:
        return BucketTuning()
    if not isinstance(job.sync.bucket_mib, str):
        return BucketTuning(job.sync.bucket_mib)
    if handed_on := heirloom.bucket_mib():
        return BucketTuning(handed_on)
    items = micro_batch_size(job) * spec.items_per_sample
    flops = spec.flops_per_item * items / (layout.tensor * layout.pipeline)
    behind_s = backward_s(flops, measured_flops) if job.sync.overlap else 0.0
    return tune_bucket_size(groups.data, groups.world, device, BackwardWork(gradient_bytes(held), behind_s))
