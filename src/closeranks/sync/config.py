"""What can a job say about how gradients travel? The table ``[sync]``."""

from __future__ import annotations

from pydantic import Field

from closeranks.core.config.table import Table


class SyncConfig(Table):
    """How gradients are summed over the data ranks."""

    bucket_mib: float = Field(default=25.0, gt=0)
    """Gradients travel in buckets of this many MiB; the plan is part of the numerics."""
    first_bucket_mib: float = Field(default=1.0, gt=0)
    """The first bucket to leave is smaller, so that the link has work early in the backward pass."""
