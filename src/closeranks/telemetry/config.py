"""What may a job say about its own record? The ``[telemetry]`` table.

Invariant: loads without torch, so that a wrong step range is found before anything starts.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from closeranks.core.config.table import ConfigTable
from closeranks.core.errors import UserError
from closeranks.telemetry.sinks.config import MlflowConfig, OtlpConfig, PrometheusConfig, WandbConfig
from closeranks.telemetry.step_range import parse_step_range


class TelemetryConfig(ConfigTable):
    log_every: int = Field(default=10, ge=1)
    """If the output is not a terminal: print a line every this many steps (always the first and the last)."""

    tensorboard: bool = False
    """Also write TensorBoard scalars to the run folder (needs `pip install closeranks[track]`)."""

    prometheus: PrometheusConfig = PrometheusConfig()
    """An endpoint that Prometheus scrapes."""

    otlp: OtlpConfig = OtlpConfig()
    """OpenTelemetry metrics, sent to a collector."""

    mlflow: MlflowConfig = MlflowConfig()
    """A run in MLflow."""

    wandb: WandbConfig = WandbConfig()
    """A run in Weights & Biases."""

    report: bool = True
    """Draw the curves and write report.md when the run ends."""

    profile: str = ""
    """Steps to trace with the torch profiler: "10:13" traces steps 10, 11 and 12; empty traces none."""

    prices: str = ""
    """A TOML file with what an hour of each device costs (docs/goodput.md). They come before the built-in ones."""

    target_loss: float | None = Field(default=None, allow_inf_nan=False)
    """A loss to reach: status and report say when the run first did and what it cost until then (docs/goodput.md)."""

    phases: bool = True
    """Measure where the time of every step goes, and what it sends. It costs some tens of microseconds a step."""

    count_flops: bool = False
    """Count the FLOPs of a module of your own, so that MFU is shown: your loss runs once more, on tensors without data
    (docs/runs.md)."""

    sample_s: float = Field(default=5.0, ge=0, allow_inf_nan=False)
    """Seconds between two looks at processors, memory, disks, network and GPU, in a thread of their own; 0: none."""

    nvtx: bool | Literal["auto"] = "auto"
    """Mark the phases of a step as NVTX ranges, for Nsight Systems. "auto": if a profiler is attached to the run."""

    @field_validator("profile")
    @classmethod
    def _window_reads(cls, text: str) -> str:
        try:
            parse_step_range(text)
        except UserError as error:
            raise ValueError(str(error)) from None
        return text
