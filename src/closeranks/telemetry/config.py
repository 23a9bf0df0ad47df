"""What may a job say about its own record? The ``[telemetry]`` table.

Invariant: loads without torch, so that a wrong step range is found before anything starts.
"""

from __future__ import annotations

from pydantic import Field, field_validator

from closeranks.core.config.table import ConfigTable
from closeranks.core.errors import UserError
from closeranks.telemetry.step_range import parse_step_range


class TelemetryConfig(ConfigTable):
    log_every: int = Field(default=10, ge=1)
    """If the output is not a terminal: print a line every this many steps (always the first and the last)."""

    tensorboard: bool = False
    """Also write TensorBoard scalars to the run folder (needs `pip install closeranks[track]`)."""

    report: bool = True
    """Draw the curves and write report.md when the run ends."""

    profile: str = ""
    """Steps to trace with the torch profiler: "10:13" traces steps 10, 11 and 12; empty traces none."""

    @field_validator("profile")
    @classmethod
    def _window_reads(cls, text: str) -> str:
        try:
            parse_step_range(text)
        except UserError as error:
            raise ValueError(str(error)) from None
        return text
