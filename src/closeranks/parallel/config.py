"""What can a job say about its layout? The table ``[layout]``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from closeranks.core.config.table import ConfigTable

_MOST = 1_000_000
"""Ranks along one axis; ten times the largest cluster there is."""


class LayoutConfig(ConfigTable):
    """How the model and the batch are distributed over the workers."""

    data: int = Field(default=0, ge=0, le=_MOST)
    """Data-parallel size: ways the batch is split; 0: the workers that the other axes leave."""
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO stage: what is sharded over the data ranks. 1: optimizer state, 2: gradients too, 3: weights too."""
    shard: int = Field(default=0, ge=0, le=_MOST)
    """Over how many data ranks state is sharded; 0: all of them, fewer gives HSDP."""
    tensor: int = Field(default=1, ge=1, le=_MOST)
    """Tensor-parallel size: ways each matrix is split."""
    pipeline: int = Field(default=1, ge=1, le=_MOST)
    """Pipeline-parallel size: ranks over which the blocks are divided."""
    context: int = Field(default=1, ge=1, le=_MOST)
    """Context-parallel size: ways each sequence is split; this version supports only 1."""
    expert: int = Field(default=1, ge=1, le=_MOST)
    """Expert-parallel size: ways the experts are split; this version supports only 1."""
    schedule: str = "1f1b"
    """Pipeline schedule, the order of micro-batches: gpipe, 1f1b, interleaved-1f1b, looped-bfs,
    interleaved-zero-bubble, zbv or dualpipev."""
    hold: Literal["auto", "shards", "step"] = "auto"
    """ZeRO-2 and 3: shards frees what was gathered or summed after each use (least memory), step gathers and reduces
    once per step (least traffic); auto: shards, but step with a pipeline."""
    batch_norm: Literal["micro", "sync"] = "micro"
    """Batch norm's statistics: of each micro-batch (the same for any number of workers), or over all data ranks."""
