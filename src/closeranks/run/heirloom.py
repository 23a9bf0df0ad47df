"""What does a generation take over from the one before, so as not to find it out again?

Figures come with the payload; data that lies in memory was opened by the process that forked this one, and is shared.
Invariant: nothing is handed on that says anything about the state of training; who was handed nothing finds it out as a
first generation does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, overload

import torch

from closeranks.core.protocols import Source
from closeranks.data.config import DataConfig
from closeranks.data.sources.open import open_source
from closeranks.data.sources.registry import Split
from closeranks.run.past import Past
from closeranks.telemetry.device import measure_matmul_flops

KEY = "measured_flops"
"""Where it stands in a worker's payload, and in the first generation's ``RunStarted``."""
PAST_KEY = "past"
"""What the job fixed when it ran before, found out by who started the workers; see ``run.past``."""
BUCKET_KEY = "bucket_mib"
"""Likewise. It is part of the numerics: measured again, gradients would be added up in another order."""
_IN_MEMORY = ("text", "digits", "pairs")
"""Data of ours that is read whole when it is opened. Any other is the workers' to open: it may start threads."""


class _Chest:
    """What this process was handed, before any session is opened."""

    measured_flops = 0.0
    bucket_mib = 0.0
    past: ClassVar[Past | None] = None
    sources: ClassVar[dict[tuple[str, Split, int], Source | None]] = {}


def inherit(payload: Mapping[str, Any]) -> None:
    """Called once by the worker's entry."""
    _Chest.measured_flops = float(payload.get(KEY) or 0.0)
    _Chest.bucket_mib = float(payload.get(BUCKET_KEY) or 0.0)
    _Chest.past = Past.from_json(payload[PAST_KEY]) if PAST_KEY in payload else None


def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """What a matrix product reaches here, measured once in a run: it takes longer than the rest of a small opening."""
    return _Chest.measured_flops or measure_matmul_flops(device, dtype)


def bucket_mib() -> float:
    """The size of buckets that an earlier generation trained with; 0 where there was none."""
    return _Chest.bucket_mib


def past() -> Past | None:
    """None where nobody has looked: a script, or a worker that torchrun or srun has started."""
    return _Chest.past


def keep_sources(config: DataConfig, seed: int) -> None:
    """In the process that workers are forked from: those to come need not read the data again."""
    if config.name in _IN_MEMORY:
        for split in ("train", "eval"):
            _Chest.sources[_key(config, split, seed)] = open_source(config, split, seed)


@overload
def source(config: DataConfig, split: Literal["train"], seed: int) -> Source: ...


@overload
def source(config: DataConfig, split: Literal["eval"], seed: int) -> Source | None: ...


def source(config: DataConfig, split: Split, seed: int) -> Source | None:
    """What was kept for just this job, or the data opened now."""
    key = _key(config, split, seed)
    return _Chest.sources[key] if key in _Chest.sources else open_source(config, split, seed)


def _key(config: DataConfig, split: Split, seed: int) -> tuple[str, Split, int]:
    return config.model_dump_json(), split, seed
