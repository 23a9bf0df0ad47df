"""Caches what one generation has measured or loaded for the next one.

Figures arrive in the worker's payload; datasets that are read whole were opened by the zygote and are shared with its
forks. Invariant: nothing cached is part of the training state; without a cached value a generation measures or loads it
as the first one does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, overload

import torch

from closeranks.core.protocols import DataSource
from closeranks.data.config import DataConfig
from closeranks.data.sources.open import open_source
from closeranks.data.sources.registry import Split
from closeranks.run.job.batch_history import BatchHistory
from closeranks.telemetry.device import measure_matmul_flops

KEY = "measured_flops"
"""Key of the measured FLOP/s in a worker's payload, and in the first generation's ``RunStarted``."""
BATCH_HISTORY_KEY = "past"
"""Key of what earlier parts of the run fixed, looked up by the process that starts the workers; see
``run.job.batch_history``."""
BUCKET_KEY = "bucket_mib"
"""Key of the bucket size. It affects the numerics: with another size gradients are summed in another order."""
_IN_MEMORY = ("text", "digits", "pairs", "clicks")
"""Built-in datasets that are read whole when opened. Workers open all others themselves: those may start threads."""


class _Cache:
    """What this process was given before any session is opened."""

    measured_flops = 0.0
    bucket_mib = 0.0
    batch_history: ClassVar[BatchHistory | None] = None
    sources: ClassVar[dict[tuple[str, Split, int], DataSource | None]] = {}


def load_payload(payload: Mapping[str, Any]) -> None:
    """Called once by the worker's entry."""
    _Cache.measured_flops = float(payload.get(KEY) or 0.0)
    _Cache.bucket_mib = float(payload.get(BUCKET_KEY) or 0.0)
    _Cache.batch_history = BatchHistory.from_json(payload[BATCH_HISTORY_KEY]) if BATCH_HISTORY_KEY in payload else None


def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a matrix product on this device, measured once per run: that takes longer than opening a small run."""
    return _Cache.measured_flops or measure_matmul_flops(device, dtype)


def bucket_mib() -> float:
    """The bucket size of an earlier generation; 0 if there was none."""
    return _Cache.bucket_mib


def batch_history() -> BatchHistory | None:
    """None where no launcher has looked it up: in a script, or in a worker that torchrun or srun started."""
    return _Cache.batch_history


def cache_sources(config: DataConfig, seed: int) -> None:
    """Called in the zygote, so that workers forked later need not read the data again."""
    if config.name in _IN_MEMORY:
        for split in ("train", "eval"):
            _Cache.sources[_key(config, split, seed)] = open_source(config, split, seed)


@overload
def open_cached_source(config: DataConfig, split: Literal["train"], seed: int) -> DataSource: ...


@overload
def open_cached_source(config: DataConfig, split: Literal["eval"], seed: int) -> DataSource | None: ...


def open_cached_source(config: DataConfig, split: Split, seed: int) -> DataSource | None:
    """The source cached for exactly this job, or else opened now."""
    key = _key(config, split, seed)
    return _Cache.sources[key] if key in _Cache.sources else open_source(config, split, seed)


def _key(config: DataConfig, split: Split, seed: int) -> tuple[str, Split, int]:
    return config.model_dump_json(), split, seed
