"""How does a job want its data read?

Invariant: plain values that can be pickled, so that a loader's processes read as the rank itself would.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from closeranks.data.config import DataConfig
from closeranks.data.loading.sample_checks import SampleChecks


@dataclass(frozen=True, slots=True)
class ReadSettings:
    prefetch: int = 2
    """Steps read ahead; 0 reads inside the step."""
    workers: int = 0
    """Processes that read; 0: a thread."""
    checks: SampleChecks = field(default_factory=SampleChecks)
    on_bad: Literal["stop", "skip"] = "stop"
    max_wanted: int = 64
    """Micro-batches whose samples a source hears of before they are read."""

    @classmethod
    def of(cls, config: DataConfig) -> ReadSettings:
        """``UserError`` where a check of the job cannot be understood."""
        checks = SampleChecks.of(config.checks, finite=config.check_finite)
        return cls(config.prefetch, config.workers, checks, config.on_bad)
