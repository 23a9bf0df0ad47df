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
    overlap: bool = True
    """Let gradients travel while backward still runs, and weights be gathered ahead; off, to measure what that buys."""
    prefetch: int = Field(default=1, ge=0)
    """With zero=3: how many units ahead weights are gathered; each costs the memory of one unit. 0: only when used."""
