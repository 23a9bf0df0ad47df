"""The settings by which a job's data is read.

Invariant: plain values that can be pickled, so that loader workers read exactly as the rank itself would.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from closeranks.data.config import DataConfig
from closeranks.data.loading.sample_checks import SampleChecks


@dataclass(frozen=True, slots=True)
class ReadSettings:
    prefetch: int = 2
    """Steps to prefetch; 0 reads inside the step."""
    workers: int = 0
    """Number of loader workers; 0: a thread."""
    checks: SampleChecks = field(default_factory=SampleChecks)
    on_bad: Literal["stop", "skip"] = "stop"
    max_wanted: int = 64
    """Micro-batches whose samples are announced to the source before they are read."""

    @classmethod
    def of(cls, config: DataConfig) -> ReadSettings:
        """``UserError`` if a check of the job cannot be parsed."""
        checks = SampleChecks.of(config.checks, finite=config.check_finite)
        return cls(config.prefetch, config.workers, checks, config.on_bad)
