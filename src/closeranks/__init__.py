"""Distributed training for PyTorch that closes ranks when a worker falls.

The public names load on first use: ``import closeranks`` itself costs milliseconds and does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Hook": "closeranks.run.hooks",
    "EarlyStop": "closeranks.run.hooks",
    "TensorBoard": "closeranks.run.hooks",
    "Tracker": "closeranks.run.tracker",
    "Job": "closeranks.run.job.job",
    "load_job": "closeranks.run.job.job",
    "Loss": "closeranks.core.protocols",
    "Result": "closeranks.run.result",
    "Session": "closeranks.run.session",
    "Step": "closeranks.run.step.step",
    "train": "closeranks.run.loop",
    "train_job": "closeranks.run.loop",
    "CloseranksError": "closeranks.core.errors",
    "UserError": "closeranks.core.errors",
}

__all__ = [*_HOMES, "__version__"]

if TYPE_CHECKING:
    from closeranks.core.errors import CloseranksError as CloseranksError
    from closeranks.core.errors import UserError as UserError
    from closeranks.core.protocols import Loss as Loss
    from closeranks.run.hooks import EarlyStop as EarlyStop
    from closeranks.run.hooks import Hook as Hook
    from closeranks.run.hooks import TensorBoard as TensorBoard
    from closeranks.run.job.job import Job as Job
    from closeranks.run.job.job import load_job as load_job
    from closeranks.run.loop import train as train
    from closeranks.run.loop import train_job as train_job
    from closeranks.run.result import Result as Result
    from closeranks.run.session import Session as Session
    from closeranks.run.step.step import Step as Step
    from closeranks.run.tracker import Tracker as Tracker


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'closeranks' has no attribute '{name}'")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
