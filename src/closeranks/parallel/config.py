"""What can a job say about its layout? The table ``[layout]``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from closeranks.core.config.table import ConfigTable

_MOST = 1_000_000
"""Ranks along one axis; ten times the largest cluster there is."""


class LayoutConfig(ConfigTable):
    """How the model and the batch are spread over the workers."""

    data: int = Field(default=0, ge=0, le=_MOST)
    """Ways the batch is split; 0: as many as there are workers left after the other axes."""
    zero: Literal[0, 1, 2, 3] = 0
    """What of the model's state is sharded over the data ranks: 1 optimizer state, 2 gradients too, 3 all."""
    shard: int = Field(default=0, ge=0, le=_MOST)
    """Over how many data ranks state is sharded; 0: all of them, fewer gives HSDP."""
    tensor: int = Field(default=1, ge=1, le=_MOST)
    """Ways each matrix is split."""
    pipeline: int = Field(default=1, ge=1, le=_MOST)
    """Stages the blocks are cut into."""
    context: int = Field(default=1, ge=1, le=_MOST)
    """Ways each sequence is split; this version trains with 1 alone."""
    expert: int = Field(default=1, ge=1, le=_MOST)
    """Ways the experts are spread; this version trains with 1 alone."""
    schedule: str = "1f1b"
    """Order in which a pipeline works its micro-batches off: gpipe, 1f1b, interleaved-1f1b, looped-bfs,
    interleaved-zero-bubble, zbv or dualpipev."""
    hold: Literal["auto", "shards", "step"] = "auto"
    """ZeRO-2 and 3: shards frees what was gathered or summed after each use (least memory), step gathers and reduces
    once per step (least traffic); auto: shards, but step with a pipeline."""
    batch_norm: Literal["micro", "sync"] = "micro"
    """Batch norm's statistics: of each micro-batch (the same for any number of workers), or over all data ranks."""
